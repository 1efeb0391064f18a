"""Acceptance of connections, within limits on their number and time.

It replaces the event loop's own, which aiohttp's `SockSite` uses. Without a free descriptor,
uvloop's accepts the connections that wait and closes them unanswered, and asyncio's logs an error
for each place in the backlog, a hundred a second; here they wait until a descriptor is free. Nor
has either of them limits for a user.
"""

import asyncio
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import structlog

from shardcache.errors import ExhaustedError
from shardcache.server.listening.limits import FEWER_CONNECTIONS, Limits
from shardcache.server.listening.stalls import StallTimer
from shardcache.shared.unix_socket import credentials

log = structlog.get_logger()

# Connections accepted in one turn of the event loop.
_AT_ONCE = 64
# Pause when there is no descriptor for the next connection.
_PAUSE_S = 0.2

_LOG_PERIOD_S = 60.0  # in which one refusal or pause is logged
_END_OF_HEAD = b"\r\n\r\n"


class Acceptor:
    """Accepts connections for protocols of `inner`.

    Every connection beyond the limits gets an HTTP 503 at once.

    Args:
        refused: returns that answer.

    Attributes:
        connections: number of open ones by user; None stands for the users of TCP.
    """

    def __init__(
        self,
        inner: Callable[[], asyncio.Protocol],
        limits: Callable[[], Limits],
        refused: Callable[[ExhaustedError], bytes] | None = None,
    ) -> None:
        self.connections: Counter[int | None] = Counter()
        self._inner = inner
        self._limits = limits
        self._refused = refused or _answer
        self._serving: set[asyncio.Task[None]] = set()
        self._logged_s = -_LOG_PERIOD_S

    @contextmanager
    def accepting(self, sock: socket.socket) -> Iterator[None]:
        """Accept the connections of a non-blocking listening socket during the block."""
        self._listen(sock)
        try:
            yield
        finally:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()  # a pause may be about to end

    def _listen(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as exn:
                self._log("cannot accept connections; pausing", cause=exn.strerror)
                self._pause(sock)
                return
            self._admit(connection)

    def _pause(self, sock: socket.socket) -> None:
        """Accept nothing for a moment.

        The socket remains readable: without a pause, `_accept` would be called all the time.
        """
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        loop.call_later(_PAUSE_S, self._listen, sock)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        uid = None
        if connection.family == socket.AF_UNIX:
            _, uid, _ = credentials(connection)

        limits = self._limits()
        refusal = self._refusal(uid, limits)
        if refusal is not None:
            self._log("connections refused", uid=uid, cause=refusal)
            with suppress(OSError), connection:
                connection.send(self._refused(ExhaustedError(refusal, remedy=FEWER_CONNECTIONS)))
            return

        self.connections[uid] += 1
        protocol = _Limited(self._inner(), limits, lambda: self._left(uid))
        task = asyncio.get_running_loop().create_task(_serve(connection, protocol))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _refusal(self, uid: int | None, limits: Limits) -> str | None:
        if self.connections.total() >= limits.connections:
            return f"the daemon has {limits.connections} connections, its maximum"
        if uid not in (None, 0, os.getuid()) and self.connections[uid] >= limits.per_user:
            number = limits.per_user
            return f"this user has {number} connections to the daemon, the maximum for one"
        return None

    def _left(self, uid: int | None) -> None:
        """Note that a user's connection has ended."""
        self.connections[uid] -= 1
        if not self.connections[uid]:
            del self.connections[uid]

    def _log(self, event: str, **fields: object) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_PERIOD_S:
            self._logged_s = now_s
            log.warning(event, **fields)


async def _serve(connection: socket.socket, protocol: "_Limited") -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
    except OSError:  # the client is gone already
        connection.close()
        protocol.connection_lost(None)


class _Limited(asyncio.Protocol):
    """Passes a connection's events to `inner`, and ends the connection when its time is over."""

    def __init__(self, inner: asyncio.Protocol, limits: Limits, left: Callable[[], None]) -> None:
        self._inner = inner
        self._limits = limits
        self._left = left
        self._timer: asyncio.TimerHandle | None = None
        self._stall: StallTimer | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast(asyncio.WriteTransport, transport)
        # Not `close`: that would wait until the client has read everything written.
        end = writing.abort
        self._timer = asyncio.get_running_loop().call_later(self._limits.limit_s, end)
        if self._limits.stall_s is not None:
            self._stall = StallTimer(writing, self._limits.stall_s)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        if self._stall is not None:
            self._stall.stop()
        if self._timer is not None:  # else the connection was never made: see `_serve`
            self._timer.cancel()
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None and self._limits.first_only and not self._timer.cancelled():
            received = self._tail + data
            if _END_OF_HEAD in received:
                self._timer.cancel()
            # The mark may arrive in two pieces.
            max_tail_bytes = len(_END_OF_HEAD) - 1
            self._tail = received[-max_tail_bytes:]
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._stall is not None:
            self._stall.start()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.stop()
        self._inner.resume_writing()


def _answer(error: ExhaustedError) -> bytes:
    """Return the HTTP 503 for a connection beyond the limits."""
    body = json.dumps({"error": error.to_json()}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
