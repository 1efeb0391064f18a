"""One reader's time without a daemon: when to reconnect, and what to log."""

from __future__ import annotations

import logging
import random
import time

from shardcache.errors import NoDaemonError, StoppingError

log = logging.getLogger("shardcache")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# An announced restart deserves a warning only if it takes longer than restarts usually do.
_QUIET_S = 10.0
# Not Python's global generator: ranks seed that alike, and training depends on its sequence.
_random = random.SystemRandom()


class Outage:
    """The time from the loss of one daemon to the first answer of the next.

    Pauses are drawn between 0 and a bound that doubles with each try (full jitter: Brooker, "Exponential Backoff and
    Jitter", AWS Architecture Blog, 2015). All readers of a node lose their daemon at the same moment; this spreads out
    their reconnects, yet keeps them fast.

    Args:
        cause: the error that ended the last connection, or prevented the first.

    Attributes:
        begun_s: start of the outage, by `time.monotonic`.
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
        """Wait until the next try is due, at the latest at the deadline; return False if the deadline has passed."""
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return False
        self._report(now_s, deadline_s - now_s)
        time.sleep(min(self.draw_s(), deadline_s - now_s))
        return True

    def draw_s(self) -> float:
        """Draw the pause before the next try."""
        most_s, self._most_s = self._most_s, min(2 * self._most_s, _LONGEST_PAUSE_S)
        return _random.uniform(0, most_s)

    def _report(self, now_s: float, left_s: float) -> None:
        if self._quiet and now_s - self.begun_s > _QUIET_S:
            self._quiet = self._logged = False
        if not self._logged:
            level = logging.INFO if self._quiet else logging.WARNING
            log.log(level, "%s (%s); retrying for up to %.0f s", self._cause.message, self._cause.url, left_s)
            self._logged = True
