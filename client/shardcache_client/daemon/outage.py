"""A time without a daemon, as one reader lives through it: when it tries again, and what it says of it."""

from __future__ import annotations

import logging
import random
import time

from shardcache.errors import NoDaemonError, StoppingError

log = logging.getLogger("shardcache")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# A restart that was announced is no news before it takes longer than restarts do.
_QUIET_S = 10.0
# Of the system's: ranks seed Python's own alike, and training relies on what that gives.
_random = random.SystemRandom()


class Outage:
    """From the loss of one daemon to the first answer of the next.

    Pauses are drawn between 0 and a bound that doubles from try to try (full jitter: Brooker, "Exponential Backoff and
    Jitter", AWS Architecture Blog, 2015). A node's readers lose their daemon at one moment; so they come back spread
    out, and soon.

    Args:
        cause: what ended the last connection, or kept the first from being made.

    Attributes:
        begun_s: when, by `time.monotonic`.
    """

    def __init__(self, cause: NoDaemonError) -> None:
        self.begun_s = time.monotonic()
        self._cause = cause
        self._quiet = isinstance(cause, StoppingError)
        self._logged = False
        self._most_s = _FIRST_PAUSE_S

    def __repr__(self) -> str:
        return f"Outage(since={time.monotonic() - self.begun_s:.1f} s, quiet={self._quiet})"

    def pause(self, deadline_s: float) -> bool:
        """Wait until it is time for the next try, which may be at the deadline; False when that is over."""
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return False
        self._report(now_s, deadline_s - now_s)
        time.sleep(min(self.draw_s(), deadline_s - now_s))
        return True

    def draw_s(self) -> float:
        """Return how long to wait before the next try."""
        most_s, self._most_s = self._most_s, min(2 * self._most_s, _LONGEST_PAUSE_S)
        return _random.uniform(0, most_s)

    def _report(self, now_s: float, left_s: float) -> None:
        if self._quiet and now_s - self.begun_s > _QUIET_S:
            self._quiet = self._logged = False
        if not self._logged:
            level = logging.INFO if self._quiet else logging.WARNING
            log.log(level, "%s (%s); trying for another %.0f s", self._cause.message, self._cause.url, left_s)
            self._logged = True
