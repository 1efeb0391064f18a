"""Blocking connections to HTTP servers, direct or through a proxy, kept open for the next request.

A NAT or load balancer may drop an idle connection without notice to either end; whatever is sent over it then is lost.
"""

import asyncio
import http.client
import os
import re
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from shardcache.front import connected_front
from shardcache.near import is_near
from shardcache.transport.messages import MAX_HEAD_BYTES, PORTS, HeadError, Request, proxy_headers, request_head
from shardcache.transport.tls import client_context

IDLE_S = 10.0
"""Age at which an idle connection is closed: networks drop one after a minute at the earliest, or on a failover."""

SILENCE_S = 3.0
"""Longest wait for the first byte over a reused connection; the request is then sent again over a new one."""

NEXT_ADDRESS_S = 0.25
"""Head start of each address over the next (RFC 8305, section 5)."""

# A primed request's answer is wanted once its version is known.
_PRIMED_S = 5.0

# A dead peer is noticed within half a minute even if nothing is sent: three keepalive probes after 15 s; data that
# stays unacknowledged also ends the connection.
_OPTIONS = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms
}

# A lookup cannot be cancelled; nobody waits for the threads of those that a dead name server does not answer.
_LOOKUPS = ThreadPoolExecutor(16, thread_name_prefix="lookup")

_LOCAL = "unix"

# For name, connection, tunnel and TLS together.
_OPEN_LIMIT_S = 10.0
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3})\b *([^\r\n]*)")
_HEAD_END = re.compile(rb"\n\r?\n")


class ProxyError(ConnectionError):
    """A proxy answered a CONNECT with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def new_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket for one of the addresses that `getaddrinfo` returned for a host."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # all of them on Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class NearHostError(Exception):
    """A host's addresses, but not its name, are those of this node or its cloud's metadata service."""


async def connect(host: str, port: int, *, far_only: bool = False) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses to answer.

    Raises OSError that names the host, and with `far_only` NearHostError. The addresses checked are those connected
    to: changing the name in between gains nothing.
    """
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        addresses = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, lookup)
        return await _connected(host, addresses, far_only=far_only)
    except OSError as exn:
        raise ConnectionError(failure(exn, f"{host}:{port}")) from exn


async def _connected(host: str, addresses: Sequence[AddrInfoType], *, far_only: bool) -> socket.socket:
    near = [address[4][0] for address in addresses if is_near(str(address[4][0]))]
    if far_only and near and not is_near(host):
        raise NearHostError(f"{host} resolves to {near[0]}, which is this node or its cloud's metadata service")
    return await aiohappyeyeballs.start_connection(
        addresses, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1, socket_factory=new_socket
    )


def failure(exn: OSError, place: str) -> str:
    """Return why there is no connection to a place."""
    if isinstance(exn, ConnectionRefusedError):
        return f"connection refused by {place}"
    number = exn.errno or 0  # negative for a name that is not known
    return f"no connection to {place}: {os.strerror(number) if number > 0 else exn.strerror or exn}"


class CancelledError(Exception):
    """The request was cancelled."""


class Gate:
    """Link between the thread that reads an answer and the thread that takes the daemon's messages."""

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes  # of the body, before more credit is granted
        self._paused = self._cancelled = self._committed = self._writes = False
        self._interrupt: Callable[[], object] | None = None
        self._changed = threading.Condition()
        self.received_bytes = self.written_bytes = 0  # bytes of the body so far, and those that are in the file
        self.asked_idle_s: float | None = None  # when it was sent over a reused connection that has not answered yet

    def ready(self, wanted_bytes: int) -> int:
        """Wait until bytes may be read, and return their number. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or not (self._paused or self.used_up))
            self.check()
        return int(min(wanted_bytes, self._limit_bytes - self.received_bytes))

    def receive(self, count: int) -> bool:
        """Count received bytes; return whether they are the first, or the last that there is credit for."""
        is_first = not self.received_bytes
        self.received_bytes += count
        return is_first or self.used_up

    @property
    def used_up(self) -> bool:
        """True while there is no byte credit left."""
        return self.received_bytes >= self._limit_bytes

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the file during the block. Raises CancelledError."""
        with self._changed:
            self.check()
            self._writes = True
        try:
            yield
        finally:
            self._writes = False

    def committed(self) -> None:
        """Wait until the body may be written. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._committed)
            self.check()

    @contextmanager
    def cancellable(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Have a cancellation call `interrupt`, which ends the block with an error. Raises CancelledError for that."""
        with self._changed:
            self.check()
            self._interrupt = interrupt
        try:
            yield
        except (OSError, http.client.HTTPException, asyncio.CancelledError):
            self.check()
            raise
        finally:
            with self._changed:
                self._interrupt = None

    # called by the thread that takes the daemon's messages

    def pause(self) -> None:
        """Stop reading before the next bytes."""
        with self._changed:
            self._paused = True

    def resume(self, limit_bytes: float) -> None:
        """Continue, up to `limit_bytes` in all."""
        with self._changed:
            self._paused, self._limit_bytes = False, limit_bytes
            self._changed.notify_all()

    def commit(self) -> None:
        """Allow a held body to be written."""
        with self._changed:
            self._committed = True
            self._changed.notify_all()

    def cancel(self) -> bool:
        """Wake the thread, wherever it waits; return True if nothing will be written from now on."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
            if self._interrupt is not None:
                self._interrupt()
            return not self._writes

    def check(self) -> None:
        """Raise CancelledError if the request was cancelled."""
        if self._cancelled:
            raise CancelledError


class Server(NamedTuple):
    """A server and the way to connect to it."""

    scheme: str  # "http", "https", or `_LOCAL`
    netloc: str  # with `_LOCAL`, the path of a tier's front
    proxy: str | None
    ca_file: str | None
    far_only: bool


@dataclass(slots=True, eq=False)
class HttpConnection:
    """One connection, one request at a time."""

    socket: socket.socket
    heard_s: float | None = None  # time when its last answer ended; None before the first
    is_primed: bool = False  # True once a request has been sent ahead of its exchange, until that begins

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def end_reads(self) -> None:
        """End a blocking read in any thread.

        Through the base class: after SSLSocket.shutdown the reading thread would take ciphertext for the body.
        """
        with suppress(OSError):  # the peer closed it first
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    @property
    def is_readable(self) -> bool:
        """True if bytes or the stream's end have arrived, after which an idle connection is unusable."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        has_plaintext = isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0
        return has_plaintext or bool(poller.poll(0))


@dataclass(frozen=True, slots=True, eq=False)
class Primed:
    """A request sent ahead of its exchange, so that the answer is on its way when its version becomes known."""

    gate: Gate
    opening: Future[HttpConnection]
    sent_s: float = field(default_factory=time.monotonic)

    def drop(self) -> None:
        """Close the connection, once it is open."""

        def close(opening: Future[HttpConnection]) -> None:
            if opening.exception() is None:
                opening.result().close()

        self.gate.cancel()
        self.opening.add_done_callback(close)


@dataclass(slots=True, eq=False, repr=False)
class Pool:
    """Idle connections, most recently used first; all of them are distrusted once one stays silent.

    Attributes:
        primed: requests that have been sent ahead, by url.
    """

    # Called with the time of a request that got no answer: other processes are affected, too.
    _report: Callable[[float], None] = lambda asked_s: None
    _: KW_ONLY
    silence_s: float = SILENCE_S
    idle_s: float = IDLE_S
    primed: dict[str, Primed] = field(default_factory=dict, init=False)
    _answered_s: float = field(default=0.0, init=False)  # time of the latest answer over a reused connection
    _idle: dict[Server, list[HttpConnection]] = field(default_factory=lambda: defaultdict(list), init=False)
    _trusted_from_s: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take(self, server: Server) -> HttpConnection | None:
        """Return an idle connection that may still work, or None."""
        while True:
            with self._lock:
                idle = self._idle[server]
                connection = idle.pop() if idle else None
            if connection is None:
                return None
            if connection.is_readable or (connection.heard_s or 0.0) < time.monotonic() - self.idle_s:
                connection.close()
                continue
            return connection

    def prime(self, request: Request, gate: Gate) -> HttpConnection:
        """Send a request, and return its connection. Raises as `open_connection` does."""
        server = server_of(request)
        connection = self.take(server) or open_connection(server, gate)
        connection.is_primed = True
        try:
            connection.socket.sendall(request_head(request))
        except BaseException:
            connection.close()
            raise
        return connection

    def keep(self, server: Server, connection: HttpConnection) -> None:
        """Keep a connection for the next request."""
        connection.heard_s = time.monotonic()
        with self._lock:
            self._idle[server].append(connection)

    @property
    def patience_s(self) -> float | None:
        """Longest wait for an answer over a reused connection; None for no limit.

        There is none for `idle_s` after a connection stayed silent: all that were idle then have been closed, so if
        another one is silent, the origin is slow.
        """
        return None if time.monotonic() < self._trusted_from_s else self.silence_s

    def answered(self) -> None:
        """Record an answer over a reused connection."""
        self._answered_s = time.monotonic()

    def silent(self, asked_s: float) -> None:
        """Distrust idle connections in all processes: one got no answer to a request sent at `asked_s`."""
        self.distrust(asked_s)
        self._report(asked_s)

    def given_up(self, asked_s: float) -> None:
        """Treat a cancelled request as a silent connection, unless another request has been answered since."""
        if self._answered_s <= asked_s:
            self.silent(asked_s)

    def distrust(self, before_s: float) -> None:
        """Close the connections that have been idle since before `before_s`."""
        self._trusted_from_s = time.monotonic() + self.idle_s
        self._drop(before_s)

    def expire(self) -> None:
        """Close the connections that have been idle for `idle_s`, and the primed ones that nobody has come for."""
        now_s = time.monotonic()
        self._drop(now_s - self.idle_s)
        for url in [url for url, primed in list(self.primed.items()) if primed.sent_s < now_s - _PRIMED_S]:
            if (primed := self.primed.pop(url, None)) is not None:
                primed.drop()

    def _drop(self, before_s: float) -> None:
        with self._lock:
            for idle in self._idle.values():
                for connection in idle[:]:
                    if (connection.heard_s or 0.0) < before_s:
                        idle.remove(connection)
                        connection.close()


def server_of(request: Request) -> Server:
    """Return the server of a request."""
    url = urlsplit(request.url)
    if request.via is not None:
        return Server(_LOCAL, request.via, None, None, far_only=False)
    return Server(url.scheme, url.netloc, request.proxy, request.ca_file, request.far_only)


def open_connection(server: Server, gate: Gate) -> HttpConnection:
    """Return a new connection. Raises OSError, HeadError, NearHostError, CancelledError."""
    if server.scheme == _LOCAL:
        return HttpConnection(_open_front(server.netloc))
    deadline_s = time.monotonic() + _OPEN_LIMIT_S
    url = urlsplit(f"{server.scheme}://{server.netloc}")
    host, port = url.hostname or "", url.port or PORTS[url.scheme]
    try:
        connection = HttpConnection(asyncio.run(_opened(server, host, port, gate)))
        if url.scheme == "https":
            _encrypt(connection, host, server.ca_file, deadline_s, gate)
    except TimeoutError:
        raise TimeoutError(f"no connection to {host}:{port} within {_OPEN_LIMIT_S:g} s") from None
    connection.socket.settimeout(None)  # the daemon decides how long to wait for an answer
    return connection


def _open_front(path: str) -> socket.socket:
    """Return a connection to this node's nginx. Raises OSError that names the path."""
    try:
        sock = connected_front(path, _OPEN_LIMIT_S)
    except OSError as exn:
        raise ConnectionError(failure(exn, path)) from exn
    sock.settimeout(None)
    return sock


async def _opened(server: Server, host: str, port: int, gate: Gate) -> socket.socket:
    """Return a socket that is connected to a server, through a proxy's tunnel if it needs one."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    with gate.cancellable(partial(loop.call_soon_threadsafe, task.cancel)):
        async with asyncio.timeout(_OPEN_LIMIT_S):  # TimeoutError is an OSError
            if server.proxy is None:
                return await connect(host, port, far_only=server.far_only)
            proxy = urlsplit(server.proxy)
            sock = await connect(proxy.hostname or "", proxy.port or PORTS["http"])
            if server.scheme == "https":
                try:
                    await _open_tunnel(sock, f"{host}:{port}" if ":" not in host else f"[{host}]:{port}", proxy)
                except BaseException:
                    sock.close()
                    raise
            return sock


async def _open_tunnel(sock: socket.socket, target: str, proxy: SplitResult) -> None:
    loop, head, newest = asyncio.get_running_loop(), bytearray(), 0
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    lines += (f"{name}: {value}" for name, value in proxy_headers(proxy.geturl()).items())
    await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode())
    while not _HEAD_END.search(head, max(0, len(head) - newest - 2)):
        data = await loop.sock_recv(sock, MAX_HEAD_BYTES)
        head += data
        newest = len(data)
        if not data:
            raise ConnectionResetError(f"the proxy {proxy.hostname} closed the connection before its answer's end")
        if len(head) > MAX_HEAD_BYTES:
            raise HeadError
    if (answer := _STATUS_LINE.match(head)) is None:
        raise ConnectionError(f"the answer of the proxy {proxy.hostname} is not HTTP")
    if answer[1] != b"200":
        status, reason = int(answer[1]), answer[2].decode("latin-1")
        raise ProxyError(status, f"the proxy {proxy.hostname} answered {status} {reason}")


def _encrypt(connection: HttpConnection, host: str, ca_file: str | None, deadline_s: float, gate: Gate) -> None:
    """Perform the TLS handshake. Closes the connection if it fails."""
    try:
        connection.socket = client_context(ca_file).wrap_socket(
            connection.socket, server_hostname=host, do_handshake_on_connect=False
        )
        connection.socket.settimeout(max(0.001, deadline_s - time.monotonic()))  # of the whole handshake
        with gate.cancellable(connection.end_reads):
            connection.socket.do_handshake()
    except BaseException:
        connection.close()
        raise
