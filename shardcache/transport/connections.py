"""Blocking connections to HTTP servers, direct or through a proxy, kept open for the next request."""

from __future__ import annotations

import asyncio
import base64
import http.client
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from shardcache.transport.messages import Request
from shardcache.transport.sockets import IDLE_S, SILENCE_S, connect
from shardcache.transport.tls import client_context

_CONNECT_TIMEOUT_S = 10.0
_PORTS = {"http": 80, "https": 443}


class ProxyError(ConnectionError):
    """A proxy answered a CONNECT with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(NamedTuple):
    """A server and the way to connect to it."""

    scheme: str
    netloc: str
    proxy: str | None
    ca_file: str | None
    far_only: bool


@dataclass(slots=True, eq=False)
class HttpConnection:
    """One connection, one request at a time.

    Attributes:
        heard_s: time when its last answer ended; None before the first.
    """

    socket: socket.socket
    heard_s: float | None = None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    @property
    def is_readable(self) -> bool:
        """True if bytes or the stream's end have arrived, after which an idle connection is unusable."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        has_plaintext = isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0
        return has_plaintext or bool(poller.poll(0))


class Pool:
    """Idle connections, most recently used first; all of them are distrusted once one stays silent.

    Args:
        tell: called with the time of the request that got no answer: other processes have idle connections, too.
        silence_s: see `SILENCE_S`.
        idle_s: see `IDLE_S`.
    """

    def __init__(
        self,
        tell: Callable[[float], None] = lambda asked_s: None,
        *,
        silence_s: float = SILENCE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._tell = tell
        self._silence_s, self._idle_s = silence_s, idle_s
        self._answered_s = 0.0  # time of the latest answer over a reused connection
        self._idle: defaultdict[Server, list[HttpConnection]] = defaultdict(list)
        self._trusted_from_s = 0.0
        self._lock = threading.Lock()

    def take(self, server: Server) -> HttpConnection | None:
        """Return an idle connection that may still work, or None."""
        while True:
            with self._lock:
                idle = self._idle[server]
                connection = idle.pop() if idle else None
            if connection is None:
                return None
            if connection.is_readable or (connection.heard_s or 0.0) < time.monotonic() - self._idle_s:
                connection.close()
                continue
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
        return None if time.monotonic() < self._trusted_from_s else self._silence_s

    def answered(self) -> None:
        """Record an answer over a reused connection."""
        self._answered_s = time.monotonic()

    def silent(self, asked_s: float) -> None:
        """Distrust idle connections in all processes: one got no answer to a request sent at `asked_s`."""
        self.distrust(asked_s)
        self._tell(asked_s)

    def given_up(self, asked_s: float) -> None:
        """Treat a cancelled request as a silent connection, unless another request has been answered since."""
        if self._answered_s <= asked_s:
            self.silent(asked_s)

    def distrust(self, before_s: float) -> None:
        """Close the connections that have been idle since before `before_s`."""
        self._trusted_from_s = time.monotonic() + self._idle_s
        self._drop(before_s)

    def expire(self) -> None:
        """Close the connections that have been idle for `idle_s`."""
        self._drop(time.monotonic() - self._idle_s)

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
        return Server("http", request.via, None, None, far_only=False)
    return Server(url.scheme, url.netloc, request.proxy, request.ca_file, request.far_only)


def host_header(url: SplitResult) -> str:
    """Return the Host header of a url, without its scheme's default port, which the SDK does not sign."""
    return url.netloc.rpartition("@")[2].removesuffix(f":{_PORTS[url.scheme]}")


def open_connection(server: Server) -> HttpConnection:
    """Return a new connection. Raises OSError, http.client.HTTPException, NearHostError."""
    url = urlsplit(f"{server.scheme}://{server.netloc}")
    host, port = url.hostname or "", url.port or _PORTS[url.scheme]
    proxy = urlsplit(server.proxy) if server.proxy else None
    if proxy is None:
        sock = _connected(host, port, far_only=server.far_only)
    else:
        sock = _connected(proxy.hostname or "", proxy.port or _PORTS["http"], far_only=False)
    try:
        if url.scheme == "https":
            if proxy is not None:
                _open_tunnel(sock, f"{host}:{port}" if ":" not in host else f"[{host}]:{port}", proxy)
            sock = _context(server.ca_file).wrap_socket(sock, server_hostname=host)
        sock.settimeout(None)  # the daemon decides how long to wait for an answer
    except BaseException:
        sock.close()
        raise
    return HttpConnection(sock)


def proxy_headers(proxy: str) -> dict[str, str]:
    """Return the header with the credentials of a proxy's url, if it has any."""
    url = urlsplit(proxy)
    if url.username is None:
        return {}
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _connected(host: str, port: int, *, far_only: bool) -> socket.socket:
    async def attempt() -> socket.socket:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):  # TimeoutError is an OSError
            return await connect(host, port, far_only=far_only)

    sock = asyncio.run(attempt())
    sock.settimeout(_CONNECT_TIMEOUT_S)
    return sock


def _open_tunnel(sock: socket.socket, target: str, proxy: SplitResult) -> None:
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    lines += (f"{name}: {value}" for name, value in proxy_headers(proxy.geturl()).items())
    sock.sendall("\r\n".join([*lines, "", ""]).encode())
    with http.client.HTTPResponse(sock, method="CONNECT") as answer:
        answer.begin()
        if answer.status != 200:
            raise ProxyError(answer.status, f"the proxy {proxy.hostname} answered {answer.status} {answer.reason}")


@cache
def _context(ca_file: str | None) -> ssl.SSLContext:
    return client_context(ca_file)
