"""Stopwatch of one reader, which runs while the reader has nothing to read.

`Reader` begins and ends waits. To charge means to add the time since the last charge to two sums:
the waits of the reader, and the waits of the reader's job.
"""

import time

from shardcache.cache.readers.jobs import Job
from shardcache.cache.readers.recent_waits import RecentWaits
from shardcache.cache.waiting.stages import Stages
from shardcache.cache.waiting.waits import Wait


class WaitClock:
    """The present waits of one reader, and the time that these waits take.

    The reader's job is charged for this time. Waits may overlap. The time for which several waits
    overlap counts once, as time of the wait that began first.

    Args:
        job: the reader's job.

    Attributes:
        waited_s: the time waited since the reader connected, up to the latest `charge`.
    """

    def __init__(self, job: Job) -> None:
        self.waited_s = 0.0
        self._job = job
        self._waits: list[Wait] = []  # longest first
        # Time of the last charge, by the monotonic clock. The first charge comes with the first
        # wait, before which there is nothing to charge.
        self._charged_until_s = 0.0
        self._recent = RecentWaits()

    def __contains__(self, wait: Wait) -> bool:
        return wait in self._waits

    @property
    def runs(self) -> bool:
        """True while the reader waits."""
        return bool(self._waits)

    @property
    def since_s(self) -> float | None:
        """Start of the longest present wait by the monotonic clock; None without a wait."""
        return self._waits[0].idle_since_s if self._waits else None

    @property
    def stages(self) -> Stages | None:
        """Stages of the transfer that the reader has waited for longest, if there is one."""
        return self._waits[0].stages if self._waits else None

    def begin(self, wait: Wait) -> None:
        """Begin a wait, and record its start in it."""
        self.charge()
        wait.idle_since_s = self._charged_until_s
        self._waits.append(wait)

    def end(self, wait: Wait) -> None:
        """End a wait that has begun."""
        self.charge()
        self._waits.remove(wait)

    def charge(self) -> None:
        """Charge the job for the time since the last call, if the reader has waited.

        The causes follow from the stages of the transfer that the reader has waited for longest.
        """
        since_s = self._charged_until_s
        now_s = time.monotonic()
        self._charged_until_s = now_s
        if self._waits:
            self._recent.add(since_s, now_s)
            self.waited_s += now_s - since_s
            self._job.charge(since_s, now_s, self.stages)

    def recently_waited_s(self) -> float:
        """Return the time waited in the last `RECENT_S` seconds, as of the latest `charge`."""
        return self._recent.total_s(self._charged_until_s)
