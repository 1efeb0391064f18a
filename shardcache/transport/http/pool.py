"""Connections that are kept open for the next request, and requests that are sent ahead.

A worker is a process that sends requests for the daemon, and an exchange is one request and its
answer. A worker has one `Pool`, which the threads of all its exchanges share. An idle connection is
one that is kept open and carries no request. A primed request is sent ahead of its exchange, that
is, before the daemon asks the worker for the body.

A NAT or load balancer may drop an idle connection without notice to either end. A request sent over
such a connection is lost, and the connection stays silent: no answer comes. So a request over a
reused connection is given up after a short silence, and the pool then distrusts, that is, closes,
all connections that were idle at the same time.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from shardcache.transport.between.messages import Request
from shardcache.transport.http.gate import Gate
from shardcache.transport.http.http_heads import request_head
from shardcache.transport.http.opening import HttpConnection, Server, open_connection, server_of

IDLE_S = 10.0
"""Time without a request after which a connection is closed.

Networks drop an idle connection after a minute at the earliest, or on a failover.
"""

SILENCE_S = 3.0
"""Longest wait for the first byte over a reused connection.

After this time, the request is sent again over a new connection.
"""

# Age at which a primed request is dropped if no exchange has taken it. The exchange begins as soon
# as the object's version is known, so it will not begin this late.
_MAX_PRIMED_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Primed:
    """A request sent ahead, so that its answer is on its way when its exchange begins.

    Attributes:
        gate: the gate by which the opening of the connection is cancelled.
        opening: its result is the connection, once the request has been sent over it.
        sent_s: when the opening of the connection began, by the monotonic clock.
    """

    gate: Gate
    opening: Future[HttpConnection]
    sent_s: float = field(default_factory=time.monotonic)

    def drop(self) -> None:
        """Cancel the request, and close its connection if that was opened."""
        self.gate.cancel()
        self.opening.add_done_callback(_close_if_opened)


def _close_if_opened(opening: Future[HttpConnection]) -> None:
    if opening.exception() is None:
        opening.result().close()


def _report_to_nobody(asked_s: float) -> None:
    """Stand in for the callback of a pool whose silent connections need not be reported."""


class Pool:
    """Idle connections of a worker; the most recently used is taken first.

    Once one connection stays silent, all others that were idle at the time are closed.

    Args:
        report: called when a request over a reused connection got no answer, with the time when the
            request was sent, so that the other workers close their idle connections as well.

    Attributes:
        silence_s: longest wait for the first byte over a reused connection.
        idle_s: time without a request after which a connection is closed.
        primed: requests that have been sent ahead and that no exchange has taken yet, by url.
    """

    def __init__(
        self,
        report: Callable[[float], None] = _report_to_nobody,
        *,
        silence_s: float = SILENCE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self.silence_s = silence_s
        self.idle_s = idle_s
        self.primed: dict[str, Primed] = {}
        self._report = report
        # Two times by the monotonic clock: that of the latest answer over a reused connection, and
        # that until which a silent connection counts as slow rather than dropped.
        self._answered_s = 0.0
        self._patient_until_s = 0.0
        self._idle: defaultdict[Server, list[HttpConnection]] = defaultdict(list)
        self._lock = threading.Lock()  # guards `_idle`, which any thread of the worker uses

    def take(self, server: Server) -> HttpConnection | None:
        """Return an idle connection that may still work, or None."""
        while True:
            connection = self._pop(server)
            if connection is None:
                return None
            oldest_s = time.monotonic() - self.idle_s
            # If an idle connection is readable, the server has closed it, or has sent bytes that
            # belong to no request. If it was idle for too long, the network may have dropped it.
            if connection.is_readable or connection.is_idle_since_before(oldest_s):
                connection.close()
                continue
            return connection

    def _pop(self, server: Server) -> HttpConnection | None:
        """Remove and return the idle connection that was used last; None if there is none."""
        with self._lock:
            idle = self._idle.get(server)
            return idle.pop() if idle else None

    def keep(self, server: Server, connection: HttpConnection) -> None:
        """Keep a connection, whose answer has ended, for the next request."""
        connection.last_answer_s = time.monotonic()
        connection.is_primed = False
        with self._lock:
            self._idle[server].append(connection)

    def prime(self, request: Request, gate: Gate) -> HttpConnection:
        """Send a request ahead, and return its connection. Raises what `open_connection` raises."""
        server = server_of(request)
        connection = self.take(server) or open_connection(server, gate)
        connection.is_primed = True
        try:
            connection.socket.sendall(request_head(request))
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def patience_s(self) -> float | None:
        """Longest wait for an answer over a reused connection; None for no limit.

        For `idle_s` after a connection stayed silent, there is no limit. All connections that were
        idle at that time have been closed, so if another one is silent now, its server is slow.
        """
        if time.monotonic() < self._patient_until_s:
            return None
        return self.silence_s

    def record_answer(self) -> None:
        """Record an answer over a reused connection."""
        self._answered_s = time.monotonic()

    def record_silence(self, asked_s: float) -> None:
        """Record that a request over a reused connection got no answer.

        Connections that were idle when it was sent are closed in all workers.

        Args:
            asked_s: when the request was sent, by the monotonic clock.
        """
        self.distrust(asked_s)
        self._report(asked_s)  # so that the other workers do the same

    def record_cancellation(self, asked_s: float) -> None:
        """Record that a request over a reused connection was cancelled before it was answered.

        The connection counts as silent, unless another reused connection has brought an answer
        since then.

        Args:
            asked_s: when the request was sent, by the monotonic clock.
        """
        if self._answered_s <= asked_s:
            self.record_silence(asked_s)

    def distrust(self, before_s: float) -> None:
        """Close the connections that have been idle since before `before_s`."""
        self._patient_until_s = time.monotonic() + self.idle_s
        self._close_idle(before_s)

    def expire(self) -> None:
        """Close connections that have been idle for `idle_s`, and drop old primed requests."""
        now_s = time.monotonic()
        self._close_idle(now_s - self.idle_s)

        oldest_s = now_s - _MAX_PRIMED_S
        expired = [url for url, primed in list(self.primed.items()) if primed.sent_s < oldest_s]
        for url in expired:
            primed = self.primed.pop(url, None)
            if primed is not None:  # None if an exchange has taken the request just now
                primed.drop()

    def _close_idle(self, before_s: float) -> None:
        """Close the idle connections whose last answer ended before `before_s`."""
        with self._lock:
            for server, idle in list(self._idle.items()):
                for connection in idle[:]:
                    if connection.is_idle_since_before(before_s):
                        idle.remove(connection)
                        connection.close()
                if not idle:
                    del self._idle[server]
