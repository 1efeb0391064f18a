"""Acceptance of connections, within limits on their number and time.

A connection beyond the limits on their number is refused: it gets an error, and is closed.

aiohttp's `SockSite` lets the event loop accept connections, without limits per user. When there is
no free descriptor, uvloop accepts waiting connections and closes them unanswered, and asyncio logs
a hundred errors a second. With an `Acceptor`, connections wait until a descriptor is free.
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

from shardcache.server.listening.limits import FEWER_CONNECTIONS, Limits
from shardcache.server.listening.stalls import StallTimer
from shardcache.shared.exceptions import ExhaustedError
from shardcache.shared.unix_socket import peer_ids

log = structlog.get_logger()

# Maximum number of connections that are accepted in one iteration of the event loop.
_MAX_ACCEPTED = 64
# Time for which nothing is accepted when there is no descriptor for the next connection.
_PAUSE_S = 0.2

_LOG_PERIOD_S = 60.0  # at most one refusal or pause is logged in this time
_END_OF_HEAD = b"\r\n\r\n"  # of an HTTP request


class Acceptor:
    """Accepts connections, and refuses those beyond the limits.

    Args:
        new_protocol: returns the asyncio protocol that serves a new connection.
        limits: returns the present limits.
        refusal: returns the answer to a connection that is refused; an HTTP 503 by default.

    Attributes:
        connections: number of open connections by user id; None stands for all users of TCP, who
            are not known.
    """

    def __init__(
        self,
        new_protocol: Callable[[], asyncio.Protocol],
        limits: Callable[[], Limits],
        refusal: Callable[[ExhaustedError], bytes] | None = None,
    ) -> None:
        self.connections: Counter[int | None] = Counter()
        self._new_protocol = new_protocol
        self._limits = limits
        self._refusal = refusal or _http_503
        # Tasks that hand connections over. The event loop alone would not keep them alive.
        self._hand_overs: set[asyncio.Task[None]] = set()
        self._logged_s = -_LOG_PERIOD_S  # time of the last warning, by the monotonic clock

    @contextmanager
    def accepting(self, sock: socket.socket) -> Iterator[None]:
        """Accept the connections of a non-blocking listening socket during the block."""
        self._start_accepting(sock)
        try:
            yield
        finally:
            asyncio.get_running_loop().remove_reader(sock)
            # If accepting is paused, `_start_accepting` sees at the pause's end that it is closed.
            sock.close()

    def _start_accepting(self, sock: socket.socket) -> None:
        """Let the event loop call `_accept` for new connections, unless the socket is closed."""
        if sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        """Accept connections that are waiting."""
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, ConnectionError):
                # None is waiting, or the next client has disconnected already. If more are waiting,
                # the event loop calls this method again.
                return
            except OSError as exn:  # most likely, there is no free descriptor
                self._log("cannot accept connections; pausing", cause=exn.strerror)
                self._pause(sock)
                return
            self._admit(connection)

    def _pause(self, sock: socket.socket) -> None:
        """Accept nothing for a moment.

        The socket stays readable as long as connections wait. Without a pause, the event loop would
        call `_accept` all the time.
        """
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        loop.call_later(_PAUSE_S, self._start_accepting, sock)

    def _admit(self, connection: socket.socket) -> None:
        """Hand a new connection over to its protocol, or refuse it."""
        connection.setblocking(False)
        uid = None  # for TCP, whose users are not known
        if connection.family == socket.AF_UNIX:
            _, uid, _ = peer_ids(connection)

        limits = self._limits()
        reason = self._reason_to_refuse(uid, limits)
        if reason is not None:
            self._log("connections refused", uid=uid, cause=reason)
            refusal = self._refusal(ExhaustedError(reason, remedy=FEWER_CONNECTIONS))
            with suppress(OSError), connection:  # the client may have disconnected
                connection.send(refusal)
            return

        self.connections[uid] += 1
        task = asyncio.get_running_loop().create_task(self._hand_over(connection, uid, limits))
        self._hand_overs.add(task)
        task.add_done_callback(self._hand_overs.discard)

    async def _hand_over(self, connection: socket.socket, uid: int | None, limits: Limits) -> None:
        """Hand a connection over to its protocol, which serves it from then on."""

        def forget() -> None:
            self._forget(uid)

        protocol = _LimitedProtocol(self._new_protocol(), limits, on_end=forget)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client is gone already
            connection.close()
            forget()

    def _reason_to_refuse(self, uid: int | None, limits: Limits) -> str | None:
        """Return the reason to refuse a user's new connection; None if there is none."""
        if self.connections.total() >= limits.connections:
            return f"the daemon has {limits.connections} connections, its maximum"
        # The users of TCP are not known; root and the daemon's own user have no limit.
        has_own_limit = uid not in (None, 0, os.getuid())
        if has_own_limit and self.connections[uid] >= limits.per_user:
            maximum = limits.per_user
            return f"this user has {maximum} connections to the daemon, the maximum for one"
        return None

    def _forget(self, uid: int | None) -> None:
        """Remove a connection that has ended from the user's count."""
        self.connections[uid] -= 1
        if not self.connections[uid]:
            del self.connections[uid]

    def _log(self, event: str, **fields: object) -> None:
        """Log a warning, unless another warning was logged within `_LOG_PERIOD_S`."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_PERIOD_S:
            self._logged_s = now_s
            log.warning(event, **fields)


class _LimitedProtocol(asyncio.Protocol):
    """Passes a connection's events to `inner`, and ends a connection that takes too long.

    Args:
        inner: the protocol that serves the connection.
        limits: has the limits on the connection's whole lifetime, on the time until its first
            request, and on the time for which the client reads nothing.
        on_end: called when the connection has ended.
    """

    def __init__(self, inner: asyncio.Protocol, limits: Limits, on_end: Callable[[], None]) -> None:
        self._inner = inner
        self._limits = limits
        self._on_end = on_end
        # Each timer is None if its limit is.
        self._lifetime_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None  # None once the head has arrived, too
        self._stall_timer: StallTimer | None = None
        self._tail = b""  # the last bytes received, while the first request's head is incomplete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timers of the connection."""
        write_transport = cast(asyncio.WriteTransport, transport)
        loop = asyncio.get_running_loop()
        limits = self._limits
        # The timers call `abort`, as `close` waits until the client has read all that was written.
        if limits.lifetime_s is not None:
            self._lifetime_timer = loop.call_later(limits.lifetime_s, write_transport.abort)
        if limits.first_request_s is not None:
            self._head_timer = loop.call_later(limits.first_request_s, write_transport.abort)
        if limits.stall_s is not None:
            self._stall_timer = StallTimer(write_transport, limits.stall_s)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and report the connection's end."""
        self._on_end()
        if self._lifetime_timer is not None:
            self._lifetime_timer.cancel()
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._stall_timer is not None:
            self._stall_timer.stop()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data on; stop the head's timer once the first request's head has arrived."""
        if self._head_timer is not None:
            received = self._tail + data
            if _END_OF_HEAD in received:
                self._head_timer.cancel()
                self._head_timer = None
            # The end of the head may arrive in two pieces, so the last bytes are kept.
            max_tail_bytes = len(_END_OF_HEAD) - 1
            self._tail = received[-max_tail_bytes:]
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Start the stall timer: bytes wait in the transport's buffer for the client to read."""
        if self._stall_timer is not None:
            self._stall_timer.start()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Stop the stall timer: no bytes wait in the transport's buffer any more."""
        if self._stall_timer is not None:
            self._stall_timer.stop()
        self._inner.resume_writing()


def _http_503(error: ExhaustedError) -> bytes:
    """Return the HTTP 503 for a connection beyond the limits."""
    body = json.dumps({"error": error.to_json()}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
