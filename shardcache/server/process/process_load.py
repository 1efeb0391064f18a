"""The load of the daemon's process: its event loop's lag, files, threads and memory.

The status page and `/metrics` show it. The lag is the time by which a timer of the event loop is
late, because the loop was busy with something else.
"""

import asyncio
import math
import os
import time
from collections import deque
from pathlib import Path

from shardcache.telemetry.metrics import Histogram

# Interval of measurements. Each one wakes the processor of an idle daemon, which takes 0.2 ms.
_LAG_PERIOD_S = 0.1
_REMEMBERED_S = 600.0  # time for which measurements are kept
# Upper bounds of the histogram, in seconds.
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Distribution of the event loop's timer lag over the last ten minutes.

    Attributes:
        since_start: the same distribution, but since the start, as a histogram.
    """

    def __init__(self) -> None:
        self.since_start = Histogram(_BOUNDS_S)
        # The measurements of the last ten minutes, the latest last.
        self._lags_s: deque[float] = deque(maxlen=int(_REMEMBERED_S / _LAG_PERIOD_S))

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            # This does not use the loop's own clock, which stands still while the loop is blocked.
            due_s = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self.note(time.monotonic() - due_s)

    def note(self, lag_s: float) -> None:
        """Add one measurement; forget the one of ten minutes ago.

        Args:
            lag_s: time by which the timer was late; counts as 0 if a coarse timer was early.
        """
        lag_s = max(lag_s, 0.0)
        self._lags_s.append(lag_s)
        self.since_start.observe(lag_s)

    def to_json(self) -> dict[str, float]:
        """Return median, 99th percentile and maximum in seconds; 0 before the first measurement."""
        lags_s = sorted(self._lags_s) or [0.0]
        return {
            "p50_s": _quantile(lags_s, 0.5),
            "p99_s": _quantile(lags_s, 0.99),
            "max_s": _quantile(lags_s, 1.0),
        }


def _quantile(ascending: list[float], fraction: float) -> float:
    """Return the smallest value that at least this fraction of all values does not exceed, rounded.

    Args:
        ascending: all values in ascending order; at least one.
        fraction: above 0, at most 1; 0.5 for the median.
    """
    index = math.ceil(fraction * len(ascending)) - 1
    return round(ascending[index], 5)


def process_stats() -> dict[str, int]:
    """Return the process's open file descriptors, threads, tasks and resident memory in bytes."""
    # The numbers come from proc(5). This runs on the event loop, so it does not create a Path for
    # each entry.
    fds = os.listdir("/proc/self/fd")  # noqa: PTH208
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    _size, resident_pages, *_ = Path("/proc/self/statm").read_text().split()
    return {
        "fds": len(fds) - 1,  # without the descriptor by which the folder was listed
        "threads": len(threads),
        "tasks": len(asyncio.all_tasks()),
        "rss_bytes": int(resident_pages) * os.sysconf("SC_PAGE_SIZE"),
    }
