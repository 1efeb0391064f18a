"""Load of the daemon's process: the event loop's lag, descriptors, threads, tasks and memory."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter, deque
from pathlib import Path

from shardcache.metrics import Histogram

_PERIOD_S = 0.05
_REMEMBERED_S = 600.0
# Values are stored as bucket numbers; each bucket is 10 % wider than the one below it.
_MIN_S = 1e-5
_WIDTH = math.log(1.1)
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Distribution of the loop's timer lag over the last ten minutes, accurate to 10 %.

    Attributes:
        since_start: histogram of every measurement since the start.
    """

    def __init__(self) -> None:
        self._buckets: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        self.since_start = Histogram(_BOUNDS_S)

    def __repr__(self) -> str:
        return f"LoopLag(samples={len(self._buckets)}, p99_s={self.quantile_s(0.99):.3g})"

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s = time.monotonic() + _PERIOD_S  # the loop's own clock stands still while the loop is blocked
            await asyncio.sleep(_PERIOD_S)
            self.note(time.monotonic() - due_s)

    def note(self, late_s: float) -> None:
        """Add one measurement, in seconds, and drop the oldest."""
        bucket = math.ceil(math.log(max(late_s, _MIN_S) / _MIN_S) / _WIDTH)
        self._buckets.append(bucket)
        self.since_start.observe(late_s)
        self._counts[bucket] += 1
        if len(self._buckets) > _REMEMBERED_S / _PERIOD_S:
            self._counts[self._buckets.popleft()] -= 1

    def quantile_s(self, share: float) -> float:
        """Return the quantile at `share` (0 to 1), in seconds; 0 before the first measurement."""
        wanted = share * len(self._buckets)
        for bucket in sorted(self._counts) if wanted else ():
            wanted -= self._counts[bucket]
            if wanted <= 0:
                return _MIN_S * math.exp(bucket * _WIDTH)
        return 0.0

    def to_json(self) -> dict[str, float]:
        """Return the median, 99th percentile and maximum, in seconds."""
        shares = {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}
        return {name: round(self.quantile_s(share), 5) for name, share in shares.items()}


_SELF = Path("/proc/self")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_stats() -> dict[str, int]:
    """Return the open file descriptors, threads, tasks of the running event loop and resident memory; see proc(5)."""
    return {
        "fds": _count(_SELF / "fd") - 1,  # without the one that lists the folder
        "threads": _count(_SELF / "task"),
        "tasks": len(asyncio.all_tasks()),
        "rss_bytes": int((_SELF / "statm").read_text().split()[1]) * _PAGE_BYTES,
    }


def _count(folder: Path) -> int:
    return len(os.listdir(folder))  # noqa: PTH208  # no Path object per entry: this runs on the event loop
