"""Waiting: for a shard, and for the next daemon after one was lost."""

from __future__ import annotations

import logging
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shardcache.errors import DaemonError, NoDaemonError, ShardTimeoutError, StoppingError

log = logging.getLogger("shardcache")

T = TypeVar("T")

# How often a waiting reader calls `on_wait` and checks that its training process still runs.
_LOOK_UP_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# An announced restart deserves a warning only if it takes longer than restarts usually do.
_QUIET_S = 10.0
# Not Python's global generator: ranks seed that alike, and training depends on its sequence.
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits for waiting: for one shard, for a lost daemon, and until a wait is logged.

    Attributes:
        limit_s: how long to wait for one shard, or for a daemon that went away.
        first_report_s: how long a wait lasts before it is first logged.
        next_report_s: interval between further log lines.
        grace_s: how long to wait for the node's daemon if a private one can replace it; a restart takes two seconds.
        retry_s: delay before the node's daemon is first tried again after that.
    """

    limit_s: float = 300.0
    first_report_s: float = 10.0
    next_report_s: float = 60.0
    grace_s: float = 10.0
    retry_s: float = 10.0

    def wait(
        self,
        url: str,
        poll: Callable[[float], T | None],
        explain: Callable[[], str],
        on_wait: Callable[[], None] | None,
    ) -> T:
        """Wait for a shard, and log the reason of a long wait. Raises ShardTimeoutError after `limit_s`.

        Args:
            poll: returns the shard, or None if it has not arrived by the given time.
            explain: returns the reason of the wait.
            on_wait: called periodically.
        """
        start_s = time.monotonic()
        deadline_s, report_s = start_s + self.limit_s, start_s + self.first_report_s
        while True:
            arrived = poll(min(report_s, deadline_s, time.monotonic() + _LOOK_UP_S))
            if arrived is not None:
                return arrived
            check_parent()
            if on_wait is not None:
                on_wait()
            if time.monotonic() < min(report_s, deadline_s):
                continue
            reason = explain()
            if time.monotonic() >= deadline_s:
                raise ShardTimeoutError(
                    f"did not arrive within {self.limit_s:g} s: {reason}",
                    url=url,
                    remedy="fix that cause (`shardcache status` shows the transfers), or raise timeout_s",
                )
            log.warning("waiting for %s for %.0f s: %s", url, time.monotonic() - start_s, reason)
            report_s = time.monotonic() + self.next_report_s


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
        self._max_s = _FIRST_PAUSE_S

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
        max_s, self._max_s = self._max_s, min(2 * self._max_s, _LONGEST_PAUSE_S)
        return _random.uniform(0, max_s)

    def _report(self, now_s: float, left_s: float) -> None:
        if self._quiet and now_s - self.begun_s > _QUIET_S:
            self._quiet = self._logged = False
        if not self._logged:
            level = logging.INFO if self._quiet else logging.WARNING
            log.log(level, "%s (%s); retrying for up to %.0f s", self._cause.message, self._cause.url, left_s)
            self._logged = True


def check_parent() -> None:
    """Raise DaemonError in a worker whose training process has ended, as it would wait for minutes in vain."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise DaemonError("the training process that this worker reads for has ended")
