"""HTTP/1.1 ranged reads, from the socket straight into the caller's buffer, and questions that have no body.

General clients hand a body out in chunks of their own making, each copied twice before it is where it belongs; that
takes more of a processor than everything else on a shard's way. This one knows a single kind of answer, a body of
exactly the size that was asked for, and returns any other's head for somebody else to make sense of.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import SplitResult, urlsplit

from shardcache.origin.base import Flow, Free
from shardcache.origin.sockets import IDLE_S, SILENCE_S, Distrust, connect

_HEAD_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 10.0
_LEAST_READ_BYTES = 4 * 1024
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Head:
    """An answer's status and headers, names in lower case. `complete`: its body is in the buffer."""

    status: int
    headers: Mapping[str, str]
    complete: bool


class Wire:
    """Connections to any number of servers, kept open for the next read.

    Args:
        ca_file: certificates to trust, for https.
    """

    def __init__(self, ca_file: str | None) -> None:
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None
        self._pools: defaultdict[tuple[str, str], _Pool] = defaultdict(_Pool)

    async def read(self, url: str, headers: Mapping[str, str], buffer: memoryview, flow: Flow) -> Head:
        """GET a url into the buffer.

        Raises OSError when the connection fails or the answer is no HTTP. When this is cancelled or fails, nothing is
        written to the buffer any more.
        """
        return await self._request("GET", url, headers, buffer, flow)

    async def head(self, url: str, headers: Mapping[str, str]) -> Head:
        """HEAD a url. Raises as `read` does."""
        return await self._request("HEAD", url, headers, None, Free())

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], buffer: memoryview | None, flow: Flow
    ) -> Head:
        parts = urlsplit(url)
        server = (parts.scheme, parts.netloc)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        lines = [f"{method} {target} HTTP/1.1", f"Host: {_host(parts)}", "Accept-Encoding: identity"]
        request = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
        pool = self._pools[server]
        if (connection := pool.take()) is not None:
            try:
                return await pool.ask(connection, request, buffer, flow)
            except StaleError:
                pass  # closed while nobody looked, or silent; either way a new one knows better
        connection = await self._connect(parts.scheme, parts.hostname or "", parts.port)
        return await pool.ask(connection, request, buffer, flow)

    async def close(self) -> None:
        """Close the idle connections."""
        for pool in self._pools.values():
            pool.clear()
        self._pools.clear()

    async def _connect(self, scheme: str, host: str, port: int | None) -> _Connection:
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca_file)
        tls = self._tls if scheme == "https" else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):  # TimeoutError is an OSError
            connected = await connect(host, port or _PORTS[scheme])
            _, connection = await loop.create_connection(
                _Connection, sock=connected, ssl=tls, server_hostname=host if tls else None
            )
        return connection


class _Pool:
    """Idle connections to one server, the one that was used last at the end."""

    def __init__(self) -> None:
        self._idle: list[_Connection] = []
        self._distrust = Distrust()

    def take(self) -> _Connection | None:
        """Return an idle connection that may still work, if there is one."""
        self._drop(before_s=asyncio.get_running_loop().time() - IDLE_S)
        return self._idle.pop() if self._idle else None

    async def ask(self, connection: _Connection, request: bytes, buffer: memoryview | None, flow: Flow) -> Head:
        """Return the answer over a connection, which is kept where it can take another request.

        Raises StaleError where it was idle before and is closed or silent.
        """
        asked_s, was_idle = asyncio.get_running_loop().time(), connection.heard_s is not None
        patience_s = SILENCE_S if was_idle and not self._distrust.active else None
        try:
            head = await connection.ask(request, buffer, flow, patience_s)
        except BaseException:
            if was_idle and not connection.answering:
                self._distrust.begin()
                self._drop(before_s=asked_s)
            connection.abort()
            raise
        if head.complete and head.headers.get("connection", "").lower() != "close":
            connection.heard_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()
        return head

    def clear(self) -> None:
        """Close all of them."""
        while self._idle:
            self._idle.pop().abort()

    def _drop(self, before_s: float) -> None:
        """Close those that are lost already, or that nothing was heard of since."""
        idle, self._idle = self._idle, []
        for connection in idle:
            if connection.lost or connection.heard_s is None or connection.heard_s < before_s:
                connection.abort()
            else:
                self._idle.append(connection)


class StaleError(ConnectionError):
    """The server closed the connection before it answered anything, or has long said nothing over one that was idle."""


class _Connection(asyncio.BufferedProtocol):
    """One connection, one request at a time.

    Attributes:
        heard_s: when its last answer was complete; None before the first.
    """

    _transport: asyncio.Transport  # there is one before anybody has the connection

    def __init__(self) -> None:
        self._head = bytearray(_HEAD_BYTES)
        self._filled = 0  # of the head, or of the body once there is one
        self._body: memoryview | None = None
        self._flow: Flow | None = None  # while an answer is expected
        self._outcome: Head | Exception | None = None
        self._news: asyncio.Future[None] | None = None
        self._resting = False
        self._lost: Exception | None = None
        self.heard_s: float | None = None

    @property
    def lost(self) -> bool:
        """True once it is closed."""
        return self._lost is not None

    @property
    def answering(self) -> bool:
        """True once anything came in answer to the last request."""
        return self._body is not None or self._filled > 0

    async def ask(self, request: bytes, buffer: memoryview | None, flow: Flow, patience_s: float | None) -> Head:
        """Send a request and return its answer; without a buffer, one to which there is no body.

        Raises StaleError where the connection is closed, or nothing comes for `patience_s` (None: wait for any time);
        OSError.
        """
        await flow.ready()
        self._filled, self._body, self._outcome = 0, None, None
        if self._lost is not None:
            raise StaleError("the connection is closed")
        self._buffer, self._flow = buffer, flow
        with flow.interruptible(self._rest):
            self._transport.write(request)
            outcome = await self._answer(flow, patience_s)
        self._flow = None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def abort(self) -> None:
        """Close at once and forget the buffer."""
        self._body, self._flow, self._buffer = None, None, None
        self._transport.abort()

    async def _answer(self, flow: Flow, patience_s: float | None) -> Head | Exception:
        while self._outcome is None:
            self._news = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(None if self.answering else patience_s):
                    await self._news
            except TimeoutError:
                if not self.answering:
                    raise StaleError("the connection was idle, and now nothing comes over it") from None
            if self._resting:
                await flow.ready()
                self._go_on()
        return self._outcome

    def _rest(self) -> None:
        if self._outcome is None and not self._resting and not self._transport.is_closing():
            self._resting = True
            self._transport.pause_reading()
            self._wake()

    def _go_on(self) -> None:
        self._resting = False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self, outcome: Head | Exception) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def connection_lost(self, exn: Exception | None) -> None:
        """Fail what is being waited for."""
        self._lost = exn or ConnectionResetError("the server closed the connection")
        self._end(self._lost if self.answering else StaleError(str(self._lost)))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: behind those that came, in the body or still in the head."""
        if self._body is not None and self._flow is not None and self._filled < len(self._body):
            most = max(_LEAST_READ_BYTES, self._flow.leave_bytes)
            return self._body[self._filled : int(min(len(self._body), self._filled + most))]
        return memoryview(self._head)[self._filled if self._body is None else 0 :]

    def buffer_updated(self, count: int) -> None:
        """Take note of bytes that came."""
        if self._flow is None or self._outcome is not None:
            self.abort()  # nobody asked for this
            return
        self._filled += count
        body_bytes = count if self._body is not None else self._read_head()
        if self._body is not None:
            if self._filled == len(self._body):
                self._end(self._parsed)
            self._flow.received(body_bytes)  # at last: it may say that the rest has to wait

    def _read_head(self) -> int:
        """Read the head where it is whole, and return how many bytes of the body came with it."""
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == _HEAD_BYTES:
                self._end(ConnectionError("the answer's head has no end"))
            return 0
        body_start, stop = end + 4, self._filled
        try:
            status, headers = _parse(bytes(self._head[:end]))
        except ValueError:
            self._end(ConnectionError("the answer is no HTTP"))
            return 0
        if self._buffer is None:
            self._end(Head(status, headers, complete=stop == body_start))
            return 0
        size = len(self._buffer)
        # A Content-Encoding says how the stored bytes are meant, and nothing about how they are sent.
        plain = "transfer-encoding" not in headers
        complete = status == 206 and plain and headers.get("content-length") == str(size) and stop - body_start <= size
        self._parsed = Head(status, headers, complete)
        if not complete:
            self._end(self._parsed)
            return 0
        self._body, self._filled = self._buffer, stop - body_start
        self._body[: self._filled] = memoryview(self._head)[body_start:stop]
        return self._filled


def _host(url: SplitResult) -> str:
    """Return what Host says of a url: no port that goes without saying, for the SDK signs none."""
    return url.netloc.removesuffix(f":{_PORTS[url.scheme]}")


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    """Return status and headers (RFC 9112, 4 and 5). Raises ValueError."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = status_line.split(" ", 2)
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise ValueError(line)
        if headers.setdefault(name.lower(), value.strip()) != value.strip() and name.lower() == "content-length":
            raise ValueError("two lengths")
    return int(status), headers
