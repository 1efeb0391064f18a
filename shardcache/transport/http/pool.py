"""Connections that are kept open for the next request, and requests that are sent ahead.

A NAT or load balancer may drop an idle connection without notice to either end; whatever is sent
over it then is lost.
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
"""Age at which an idle connection is closed.

Networks drop one after a minute at the earliest, or on a failover.
"""

SILENCE_S = 3.0
"""Longest wait for the first byte over a reused connection.

The request is then sent again over a new one.
"""

# Age at which a request that was sent ahead is dropped, unless an exchange has taken it: the
# object's version, which the exchange waits for, is known by then.
_PRIMED_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Primed:
    """A request sent ahead of its exchange, so that its answer is on its way when that begins.

    Attributes:
        gate: cancels it.
        opening: its connection, once the request is sent.
        sent_s: when this was begun, by the monotonic clock.
    """

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


def _report_to_nobody(asked_s: float) -> None:
    """Stand in for a report that nobody wants."""


class Pool:
    """Idle connections, most recently used first; all are distrusted once one stays silent.

    Args:
        report: called with the time of a request that got no answer: other processes are affected,
            too.

    Attributes:
        silence_s: longest wait for the first byte over a reused connection.
        idle_s: age at which an idle connection is closed.
        primed: requests that have been sent ahead, by url.
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
        self._answered_s = 0.0  # time of the latest answer over a reused connection
        self._trusted_from_s = 0.0  # time from which a silent connection counts as lost again
        self._idle: defaultdict[Server, list[HttpConnection]] = defaultdict(list)
        self._lock = threading.Lock()  # of `_idle`: any thread of the worker uses it

    def take(self, server: Server) -> HttpConnection | None:
        """Return an idle connection that may still work, or None."""
        while True:
            connection = self._pop(server)
            if connection is None:
                return None
            oldest_s = time.monotonic() - self.idle_s
            if connection.is_readable or connection.is_idle_since_before(oldest_s):
                connection.close()
                continue
            return connection

    def _pop(self, server: Server) -> HttpConnection | None:
        with self._lock:
            idle = self._idle[server]
            return idle.pop() if idle else None

    def keep(self, server: Server, connection: HttpConnection) -> None:
        """Keep a connection for the next request."""
        connection.heard_s = time.monotonic()
        with self._lock:
            self._idle[server].append(connection)

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

    @property
    def patience_s(self) -> float | None:
        """Longest wait for an answer over a reused connection; None for no limit.

        There is none for `idle_s` after a connection stayed silent: all that were idle then have
        been closed, so if another one is silent, the origin is slow.
        """
        if time.monotonic() < self._trusted_from_s:
            return None
        return self.silence_s

    def record_answer(self) -> None:
        """Record an answer over a reused connection."""
        self._answered_s = time.monotonic()

    def record_silence(self, asked_s: float) -> None:
        """Distrust idle connections in all processes, as a request over one got no answer.

        Args:
            asked_s: when that request was sent.
        """
        self.distrust(asked_s)
        self._report(asked_s)

    def record_cancellation(self, asked_s: float) -> None:
        """Record that a request over a reused connection was cancelled before it was answered.

        The connection counts as silent, unless another one has brought an answer since `asked_s`.
        """
        if self._answered_s <= asked_s:
            self.record_silence(asked_s)

    def distrust(self, before_s: float) -> None:
        """Close the connections that have been idle since before `before_s`."""
        self._trusted_from_s = time.monotonic() + self.idle_s
        self._drop(before_s)

    def expire(self) -> None:
        """Close connections idle for `idle_s`, and those of requests sent ahead but not taken."""
        now_s = time.monotonic()
        self._drop(now_s - self.idle_s)

        oldest_s = now_s - _PRIMED_S
        expired = [url for url, primed in list(self.primed.items()) if primed.sent_s < oldest_s]
        for url in expired:
            primed = self.primed.pop(url, None)
            if primed is not None:  # an exchange may just have taken it
                primed.drop()

    def _drop(self, before_s: float) -> None:
        """Close the connections that were last heard before `before_s`."""
        with self._lock:
            for idle in self._idle.values():
                for connection in idle[:]:
                    if connection.is_idle_since_before(before_s):
                        idle.remove(connection)
                        connection.close()
