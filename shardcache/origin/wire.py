"""HTTP/1.1 ranged reads, from the socket straight into the caller's buffer.

General clients hand a body out in chunks of their own making, each copied twice before it is where it belongs; that
takes more of a processor than everything else on a shard's way. This one knows a single kind of answer, a body of
exactly the size that was asked for, and returns any other's head for somebody else to make sense of.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from shardcache.origin.base import Received

_HEAD_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 10.0


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
        self._idle: dict[tuple[str, str], list[_Connection]] = {}

    async def read(self, url: str, headers: Mapping[str, str], buffer: memoryview, received: Received) -> Head:
        """GET a url into the buffer.

        Raises OSError when the connection fails or the answer is no HTTP. When this is cancelled or fails, nothing is
        written to the buffer any more.
        """
        parts = urlsplit(url)
        server = (parts.scheme, parts.netloc)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        lines = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", "Accept-Encoding: identity"]
        request = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
        idle = self._idle.setdefault(server, [])
        while idle:
            connection = idle.pop()
            try:
                return await self._ask(connection, request, buffer, received, idle)
            except StaleError:
                continue  # the server closed it while nobody looked
        connection = await self._connect(parts.scheme, parts.hostname or "", parts.port)
        return await self._ask(connection, request, buffer, received, idle)

    async def close(self) -> None:
        """Close the idle connections."""
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    async def _connect(self, scheme: str, host: str, port: int | None) -> _Connection:
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca_file)
        tls = self._tls if scheme == "https" else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):  # TimeoutError is an OSError
            _, connection = await loop.create_connection(
                _Connection, host, port or (443 if tls else 80), ssl=tls, server_hostname=host if tls else None
            )
        return connection

    @staticmethod
    async def _ask(
        connection: _Connection, request: bytes, buffer: memoryview, received: Received, idle: list[_Connection]
    ) -> Head:
        try:
            head = await connection.ask(request, buffer, received)
        except BaseException:
            connection.abort()
            raise
        if head.complete and head.headers.get("connection", "").lower() != "close":
            idle.append(connection)
        else:
            connection.abort()
        return head


class StaleError(ConnectionError):
    """The server closed the connection before it answered anything."""


class _Connection(asyncio.BufferedProtocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._head = bytearray(_HEAD_BYTES)
        self._filled = 0  # of the head, or of the body once there is one
        self._body: memoryview | None = None
        self._answer: asyncio.Future[Head] | None = None
        self._transport: asyncio.Transport | None = None
        self._lost: Exception | None = None

    async def ask(self, request: bytes, buffer: memoryview, received: Received) -> Head:
        """Send a request and return its answer."""
        if self._lost is not None or self._transport is None:
            raise StaleError("the connection is closed")
        self._filled, self._body = 0, None
        self._buffer, self._received = buffer, received
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def abort(self) -> None:
        """Close at once and forget the buffer."""
        self._body, self._answer, self._buffer = None, None, memoryview(b"")
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def connection_lost(self, exn: Exception | None) -> None:
        """Fail what is being waited for."""
        self._lost = exn or ConnectionResetError("the server closed the connection")
        begun = self._body is not None or self._filled > 0
        self._fail(self._lost if begun else StaleError(str(self._lost)))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: behind those that came, in the body or still in the head."""
        if self._body is not None and self._filled < len(self._body):
            return self._body[self._filled :]
        return memoryview(self._head)[self._filled if self._body is None else 0 :]

    def buffer_updated(self, count: int) -> None:
        """Take note of bytes that came."""
        if self._answer is None or self._answer.done():
            self.abort()  # nobody asked for this
            return
        if self._body is not None:
            self._filled += count
            self._received(count)
        else:
            self._filled += count
            self._read_head()
        if self._body is not None and self._filled == len(self._body) and not self._answer.done():
            self._answer.set_result(self._parsed)

    def _read_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == _HEAD_BYTES:
                self._fail(ConnectionError("the answer's head has no end"))
            return
        body_start, stop = end + 4, self._filled
        try:
            status, headers = _parse(bytes(self._head[:end]))
        except ValueError:
            self._fail(ConnectionError("the answer is no HTTP"))
            return
        size = len(self._buffer)
        plain = "transfer-encoding" not in headers and "content-encoding" not in headers
        complete = status == 206 and plain and headers.get("content-length") == str(size) and stop - body_start <= size
        self._parsed = Head(status, headers, complete)
        if not complete:
            assert self._answer is not None
            self._answer.set_result(self._parsed)
            return
        self._body, self._filled = self._buffer, stop - body_start
        self._body[: self._filled] = memoryview(self._head)[body_start:stop]
        self._received(self._filled)

    def _fail(self, exn: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exn)


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
