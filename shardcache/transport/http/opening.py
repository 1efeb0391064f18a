"""Connections to HTTP servers: direct, through a proxy's tunnel, or to this node's nginx.

An exchange, which is one request and its answer, calls `open_connection` when the pool has no idle
connection to a server. The tier is a cache that the nodes of a cluster share; its front is the
nginx on each node, which is reached through a Unix socket. A host is near if its name leads to this
node or to its cloud's metadata service; `far_only` refuses such hosts.
"""

import asyncio
import re
import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from shardcache.shared.front import connected_front
from shardcache.transport.between.messages import Request
from shardcache.transport.http.gate import Gate
from shardcache.transport.http.http_heads import MAX_HEAD_BYTES, PORTS, HeadError, proxy_headers
from shardcache.transport.http.sockets import connect, connection_failure
from shardcache.transport.http.tls import client_context

_UNIX = "unix"  # in place of a url's scheme, for a server behind a Unix socket

# Time limit for the lookup of the host's name, the connection, the tunnel and the TLS handshake,
# all together.
_OPEN_LIMIT_S = 10.0
# Shortest time-out to set on a socket: with 0, the socket's calls would not block at all.
_MIN_TIMEOUT_S = 0.001

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3})\b *([^\r\n]*)")
_HEAD_END = re.compile(rb"\n\r?\n")
_MAX_HEAD_END_BYTES = len(b"\n\r\n")


@dataclass(slots=True, eq=False)
class HttpConnection:
    """One connection, which carries one request at a time.

    Attributes:
        last_answer_s: when its last answer ended, by the monotonic clock; None before the first.
        is_primed: True if its present request was sent ahead of the exchange.
    """

    socket: socket.socket
    last_answer_s: float | None = None
    is_primed: bool = False

    def is_idle_since_before(self, time_s: float) -> bool:
        """Return True if its last answer ended before `time_s`, or it has had no answer yet."""
        return self.last_answer_s is None or self.last_answer_s < time_s

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def end_reads(self) -> None:
        """End a read that blocks in another thread.

        The plain socket's `shutdown` is called even for TLS: `SSLSocket.shutdown` would end the
        decryption first, and the other thread would take ciphertext for the body.
        """
        with suppress(OSError):  # raised if the peer has closed the connection first
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    @property
    def is_readable(self) -> bool:
        """True if bytes, or the stream's end, have arrived and were not read.

        An idle connection is then unusable, as no request is in flight to which they could belong.
        """
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0:
            return True
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return bool(poller.poll(0))


class ProxyError(ConnectionError):
    """A proxy answered a CONNECT with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # of the proxy's answer


class Server(NamedTuple):
    """A server and the way to connect to it. Equal servers can share idle connections.

    Attributes:
        scheme: "http", "https", or `_UNIX`.
        netloc: host and port; with `_UNIX`, the path of the socket of the tier's front.
        proxy: as `Request.proxy`.
        ca_file: as `Request.ca_file`.
        far_only: as `Request.far_only`.
    """

    scheme: str
    netloc: str
    proxy: str | None
    ca_file: str | None
    far_only: bool


def server_of(request: Request) -> Server:
    """Return the server of a request."""
    if request.via is not None:
        return Server(_UNIX, request.via, proxy=None, ca_file=None, far_only=False)
    url = urlsplit(request.url)
    return Server(url.scheme, url.netloc, request.proxy, request.ca_file, request.far_only)


def open_connection(server: Server, gate: Gate) -> HttpConnection:
    """Return a new connection to a server. Blocks.

    Args:
        gate: the request's gate, by which the opening can be cancelled.

    Raises OSError, HeadError, NearHostError, CancelledError.
    """
    if server.scheme == _UNIX:
        return HttpConnection(_open_front(server.netloc))

    deadline_s = time.monotonic() + _OPEN_LIMIT_S
    url = urlsplit(f"{server.scheme}://{server.netloc}")
    host = url.hostname or ""
    port = url.port or PORTS[url.scheme]
    try:
        connection = HttpConnection(_open_socket(server, host, port, gate))
        if url.scheme == "https":
            _encrypt(connection, host, server.ca_file, deadline_s, gate)
    except TimeoutError:
        message = f"no connection to {host}:{port} within {_OPEN_LIMIT_S:g} s"
        raise TimeoutError(message) from None
    connection.socket.settimeout(None)  # the daemon decides how long to wait for an answer
    return connection


def _open_front(path: str) -> socket.socket:
    """Return a connection to this node's nginx. Raises an OSError that names the path."""
    try:
        sock = connected_front(path, _OPEN_LIMIT_S)
    except OSError as exn:
        raise ConnectionError(connection_failure(exn, path)) from exn
    sock.settimeout(None)
    return sock


class _OpeningLoop:
    """Event loop, in a thread of its own, that opens all TCP connections of the process.

    A request's thread blocks until its connection is open. The loop is needed because several
    addresses of a host are tried at the same time.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the loop, which is started on first use."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                run = self._loop.run_forever
                threading.Thread(target=run, name="opening", daemon=True).start()
            return self._loop


_opening_loop = _OpeningLoop()


def _open_socket(server: Server, host: str, port: int, gate: Gate) -> socket.socket:
    """Return a socket that is connected to a server, through a proxy's tunnel if it needs one."""
    loop = _opening_loop.get()
    opening = asyncio.run_coroutine_threadsafe(_connect_to_server(server, host, port), loop)
    with gate.cancellable(opening.cancel):
        return opening.result()


async def _connect_to_server(server: Server, host: str, port: int) -> socket.socket:
    """Do the work of `_open_socket` in the event loop. Raises OSError, NearHostError."""
    async with asyncio.timeout(_OPEN_LIMIT_S):  # raises TimeoutError, which is an OSError
        if server.proxy is None:
            return await connect(host, port, far_only=server.far_only)

        proxy = urlsplit(server.proxy)
        sock = await connect(proxy.hostname or "", proxy.port or PORTS["http"])
        if server.scheme != "https":
            return sock  # the proxy itself gets the request, so it needs no tunnel
        try:
            await _open_tunnel(sock, _authority(host, port), proxy)
        except BaseException:
            sock.close()
            raise
        return sock


def _authority(host: str, port: int) -> str:
    """Return a host and port as one text; an IPv6 address is in brackets."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


async def _open_tunnel(sock: socket.socket, target: str, proxy: SplitResult) -> None:
    """Have a proxy connect to a server, so that the socket leads to the server from then on.

    Args:
        sock: a socket that is connected to the proxy.
        target: the server's host and port.
        proxy: the proxy's url.

    Raises OSError, which may be a ProxyError, and HeadError.
    """
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    lines += [f"{name}: {value}" for name, value in proxy_headers(proxy.geturl()).items()]
    lines += ["", ""]
    await asyncio.get_running_loop().sock_sendall(sock, "\r\n".join(lines).encode())

    head = await _receive_head(sock, f"the proxy {proxy.hostname}")
    answer = _STATUS_LINE.match(head)
    if answer is None:
        raise ConnectionError(f"the answer of the proxy {proxy.hostname} is not HTTP")
    status = int(answer[1])
    if status != HTTPStatus.OK:
        reason = answer[2].decode("latin-1")
        message = f"the proxy {proxy.hostname} answered {status} {reason}"
        raise ProxyError(status, message)


async def _receive_head(sock: socket.socket, peer: str) -> bytearray:
    """Return the bytes that a peer sends up to the end of its answer's head.

    Args:
        peer: the peer's name for error messages.
    """
    loop = asyncio.get_running_loop()
    head = bytearray()
    # Each time, only the new bytes are searched for the head's end, and the last few before them,
    # as the end may be split between two reads.
    searched_bytes = 0
    while not _HEAD_END.search(head, max(0, searched_bytes - _MAX_HEAD_END_BYTES + 1)):
        searched_bytes = len(head)
        data = await loop.sock_recv(sock, MAX_HEAD_BYTES)
        if not data:
            raise ConnectionResetError(f"{peer} closed the connection before its answer's end")
        head += data
        if len(head) > MAX_HEAD_BYTES:
            raise HeadError
    return head


def _encrypt(
    connection: HttpConnection,
    host: str,
    ca_file: str | None,
    deadline_s: float,
    gate: Gate,
) -> None:
    """Perform the TLS handshake; close the connection if the handshake fails.

    Args:
        host: the name that the server's certificate must have.
        ca_file: as `Request.ca_file`.
        deadline_s: when the handshake must have ended, by the monotonic clock.
        gate: the request's gate, by which the handshake can be cancelled.
    """
    try:
        connection.socket = client_context(ca_file).wrap_socket(
            connection.socket,
            server_hostname=host,
            do_handshake_on_connect=False,
        )
        left_s = deadline_s - time.monotonic()
        # For a handshake, a socket's time-out limits all of it, not each read.
        connection.socket.settimeout(max(_MIN_TIMEOUT_S, left_s))
        with gate.cancellable(connection.end_reads):
            connection.socket.do_handshake()
    except BaseException:
        connection.close()
        raise
