"""Acceptance of connections within limits on their number, of all users and of each, and on their time.

Not the event loop's own acceptance: without a free descriptor, asyncio's stops for a second and uvloop's for good.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

import structlog
from aiohttp import web

from shardcache.config import Settings
from shardcache.errors import ExhaustedError
from shardcache.unix_socket import credentials

log = structlog.get_logger()

# Descriptors for the daemon's own files, processes and TCP connections; for a connection to an origin; for a transfer.
_OWN_FILES = 160
_FILES_PER_CONNECTION = 2
_FILES_PER_TRANSFER = 6
# A connection takes some 20 KiB.
_MAX_CONNECTIONS = 8192
# A client that connects sends its request immediately.
_FIRST_REQUEST_S = 10.0
# Connections accepted in one turn of the event loop, and the pause without a descriptor for the next.
_AT_ONCE = 64
_PAUSE_S = 0.2
_LOG_PERIOD_S = 60.0
_END_OF_HEAD = b"\r\n\r\n"
_REMEDY = "run fewer readers, or raise the daemon's limit of open files: LimitNOFILE= in its unit, or ulimit -n"


def own_files(settings: Settings) -> int:
    """Return how many descriptors the daemon needs for itself."""
    connections, transfers = settings.max_connections, settings.max_transfers
    return _OWN_FILES + _FILES_PER_CONNECTION * connections + _FILES_PER_TRANSFER * transfers


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a listening socket's connections.

    Attributes:
        connections: maximum number at a time.
        per_user: maximum number of one user, other than root and the daemon's own.
        limit_s: maximum lifetime of a connection, or the time until its first request has arrived.
        first_only: True if `limit_s` applies to the first request.
    """

    connections: int
    per_user: int
    limit_s: float
    first_only: bool = False

    @classmethod
    def of_socket(cls, settings: Settings) -> Limits:
        """Return the limits of the Unix socket: those of the settings, within the present limit of open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        possible = max(files // 4, files - own_files(settings))
        connections = min(possible, settings.socket_connections or _MAX_CONNECTIONS)
        return cls(connections, settings.user_connections or connections // 2, _FIRST_REQUEST_S, first_only=True)

    @property
    def sessions(self) -> int:
        """Maximum number of sessions: the rest is for commands, metrics and probes, which soon end."""
        return self.connections - max(4, self.connections // 8)

    def check_sessions(self, sessions: int) -> None:
        """Raise ExhaustedError if there may be no further session."""
        if sessions >= self.sessions:
            raise ExhaustedError(f"the daemon has {sessions} readers, as many as it may have", remedy=_REMEDY)


LIMITS: web.AppKey[Callable[[], Limits]] = web.AppKey("LIMITS")
"""Returns the present limits of the Unix socket."""


class Acceptor:
    """Accepts connections for protocols of `inner`; every connection beyond the limits gets an HTTP 503 at once.

    Attributes:
        connections: number of open connections by user; None stands for the users of a TCP socket.
    """

    def __init__(self, inner: Callable[[], asyncio.Protocol], limits: Callable[[], Limits]) -> None:
        self.connections: Counter[int | None] = Counter()
        self._inner = inner
        self._limits = limits
        self._serving: set[asyncio.Task[None]] = set()
        self._logged_s = -_LOG_PERIOD_S

    def __repr__(self) -> str:
        return f"<Acceptor {self.connections.total()} connections>"

    @contextmanager
    def accepting(self, sock: socket.socket) -> Iterator[None]:
        """Accept the connections of a non-blocking listening socket during the block."""
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._accept, sock)
        try:
            yield
        finally:
            loop.remove_reader(sock)
            sock.close()  # a pause may be about to end

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as exn:  # the socket remains readable: without a pause, this would be called all the time
                self._log("cannot accept connections; pausing", cause=exn.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(sock)
                loop.call_later(_PAUSE_S, self._resume, sock)
                return
            self._admit(connection)

    def _resume(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        uid = credentials(connection)[1] if connection.family == socket.AF_UNIX else None
        limits = self._limits()
        if (refusal := self._refusal(uid, limits)) is not None:
            self._log("connections refused", uid=uid, cause=refusal)
            with suppress(OSError), connection:
                connection.send(_answer(ExhaustedError(refusal, remedy=_REMEDY)))
            return
        self.connections[uid] += 1
        protocol = _Limited(self._inner(), limits, partial(self._left, uid))
        task = asyncio.get_running_loop().create_task(_serve(connection, protocol))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _refusal(self, uid: int | None, limits: Limits) -> str | None:
        if self.connections.total() >= limits.connections:
            return f"the daemon has {limits.connections} connections, as many as it may have"
        if uid not in (None, 0, os.getuid()) and self.connections[uid] >= limits.per_user:
            return f"this user has {limits.per_user} connections to the daemon, as many as one may have"
        return None

    def _left(self, uid: int | None) -> None:
        self.connections[uid] -= 1
        if not self.connections[uid]:
            del self.connections[uid]

    def _log(self, event: str, **fields: object) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_PERIOD_S:
            self._logged_s = now_s
            log.warning(event, **fields)


async def _serve(connection: socket.socket, protocol: _Limited) -> None:
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
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not `close`: that would wait until the client has read everything written.
        end = cast(asyncio.WriteTransport, transport).abort
        self._timer = asyncio.get_running_loop().call_later(self._limits.limit_s, end)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        if self._timer is not None:
            self._timer.cancel()
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None and self._limits.first_only and not self._timer.cancelled():
            if _END_OF_HEAD in self._tail + data:
                self._timer.cancel()
            self._tail = (self._tail + data)[1 - len(_END_OF_HEAD) :]
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def _answer(error: ExhaustedError) -> bytes:
    body = json.dumps({"error": error.to_json()}).encode()
    head = "HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}"
    return "\r\n".join([*head, "Connection: close", "", ""]).encode() + body


def raise_open_files() -> None:
    """Raise this process's limit of open files as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
