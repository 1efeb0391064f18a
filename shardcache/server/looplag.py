"""How late the event loop comes to what is due: so long, too, everybody waits who asks the daemon something.

Whatever holds up the loop shows in it: a long computation, a pause of the garbage collector, a machine without a
processor to spare.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque

from shardcache.metrics import Histogram

_PERIOD_S = 0.05
_REMEMBERED_S = 600.0
# Values are kept as the number of a bucket; each bucket is a tenth wider than the one below it.
_LEAST_S = 1e-5
_WIDTH = math.log(1.1)
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """How late a timer of the loop went off, each time in the last ten minutes, to within a tenth.

    Attributes:
        since_start: the same of all times.
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
            due_s = time.monotonic() + _PERIOD_S  # the loop's own clock stands still while the loop does
            await asyncio.sleep(_PERIOD_S)
            self.note(time.monotonic() - due_s)

    def note(self, late_s: float) -> None:
        """Take one more value, in seconds, and let go the oldest."""
        bucket = math.ceil(math.log(max(late_s, _LEAST_S) / _LEAST_S) / _WIDTH)
        self._buckets.append(bucket)
        self.since_start.observe(late_s)
        self._counts[bucket] += 1
        if len(self._buckets) > _REMEMBERED_S / _PERIOD_S:
            self._counts[self._buckets.popleft()] -= 1

    def quantile_s(self, share: float) -> float:
        """Return what that share of all values does not exceed, 0 before there are any."""
        wanted = share * len(self._buckets)
        for bucket in sorted(self._counts) if wanted else ():
            wanted -= self._counts[bucket]
            if wanted <= 0:
                return _LEAST_S * math.exp(bucket * _WIDTH)
        return 0.0

    def to_json(self) -> dict[str, float]:
        """Return median, 99th percentile and maximum, in seconds."""
        shares = {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}
        return {name: round(self.quantile_s(share), 5) for name, share in shares.items()}
