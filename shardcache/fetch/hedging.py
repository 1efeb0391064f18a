"""When a part is so late that it is worth asking for a second time.

After J. Dean and L. A. Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013: a second request for the
slowest per cent of answers takes the tail off for a per cent or so of more requests.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")

HEDGED_SHARE = 0.03
"""Most second requests, as a share of all."""

_PERCENTILE = 0.99
# Where more than one answer in a hundred hangs, the percentile is the time of one of those, and no limit at all.
_MEDIANS = 5
_LEAST_OBSERVED = 100  # of fewer the 99th percentile is the slowest of all
_OBSERVED = 1000
# However the others fare, a part that takes so many times its patience is late.
_MOST_PATIENCE = 5
# What takes no longer is no tail; another request would cost more than it could save.
_LEAST_PATIENCE_S = 0.05
_MOST_CREDIT = 8.0


@dataclass(slots=True)
class _Times:
    """The times of the last parts, in the order in which they came and by length."""

    last_s: deque[float] = field(default_factory=deque)
    sorted_s: list[float] = field(default_factory=list)

    def add(self, time_s: float) -> None:
        self.last_s.append(time_s)
        insort(self.sorted_s, time_s)
        if len(self.last_s) > _OBSERVED:
            del self.sorted_s[bisect_left(self.sorted_s, self.last_s.popleft())]

    def percentile_s(self, share: float) -> float:
        """Return the nearest-rank percentile."""
        return self.sorted_s[math.ceil(share * len(self.sorted_s)) - 1]


@dataclass(slots=True)
class _Store:
    times: defaultdict[int, _Times] = field(default_factory=lambda: defaultdict(_Times))
    credit: float = 0.0


class Hedging:
    """What was seen of each store's times, and how many second requests these have earned. Pure.

    Parts are compared with parts of a like size: within a factor of two.

    Args:
        share: of a store's requests that may be asked twice; 0 for none.
    """

    def __init__(self, share: float = HEDGED_SHARE) -> None:
        self._share = share
        self._stores: defaultdict[str, _Store] = defaultdict(_Store)

    def __repr__(self) -> str:
        return f"<Hedging {self._share:.0%} of requests to {sorted(self._stores)}>"

    def took(self, store: str, size_bytes: int, time_s: float) -> None:
        """Take note of a part that came, by whichever request: how long after the first."""
        known = self._stores[store]
        known.times[size_bytes.bit_length()].add(time_s)
        known.credit = min(_MOST_CREDIT, known.credit + self._share)

    def patience_s(self, store: str, size_bytes: int) -> float | None:
        """Return how long to wait for a part until it is late; None while too little is known of the store."""
        times = self._stores[store].times[size_bytes.bit_length()]
        if not self._share or len(times.last_s) < _LEAST_OBSERVED:
            return None
        late_s = min(times.percentile_s(_PERCENTILE), _MEDIANS * times.percentile_s(0.5))
        return max(_LEAST_PATIENCE_S, late_s)

    def due_s(
        self, store: str, size_bytes: int, patience_s: float, received_bytes: int, others_bytes_per_s: Sequence[float]
    ) -> float:
        """Return the time after which a second request is likely to bring a part sooner than the first.

        Args:
            patience_s: as it was when the first request was sent.
            received_bytes: what that has brought so far.
            others_bytes_per_s: rates of the store's other parts under way. On a full line all of them are slow, and
                another request would be as slow.
        """
        if others_bytes_per_s:
            again_s = size_bytes / max(median(others_bytes_per_s), 1.0)
        else:
            again_s = self._stores[store].times[size_bytes.bit_length()].percentile_s(0.5)
        left_bytes = max(1, size_bytes - received_bytes)
        return min(max(patience_s, again_s * received_bytes / left_bytes), _MOST_PATIENCE * patience_s)

    def spend(self, store: str) -> bool:
        """Tell whether there may be one more second request, and count it."""
        known = self._stores[store]
        if known.credit < 1.0:
            return False
        known.credit -= 1.0
        return True


async def race(
    first: Coroutine[Any, Any, T],
    patience_s: float,
    second: Callable[[Callable[[], Awaitable[bool]]], Coroutine[Any, Any, T]],
) -> tuple[T, bool]:
    """Run `first`, after a while `second` as well, until one is done. The other has ended, too, when this returns.

    Args:
        second: is given a function that ends `first` and returns whether it could; only then may it do what must not
            be done twice. That it returns without having called it, or fails to, is no end of `first`.

    Returns the result, and whether it is that of `first`. Raises what either raises; then the other is cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            leader = group.create_task(first)

            async def end_leader() -> bool:
                leader.cancel()
                await asyncio.wait([leader])
                return leader.cancelled()

            await asyncio.wait([leader], timeout=patience_s)
            if not leader.done():
                spare = group.create_task(second(end_leader))
                await asyncio.wait([leader])
                if not leader.cancelled():
                    spare.cancel()
    except BaseExceptionGroup as failures:
        cause = failures.exceptions[0]
        raise cause from cause.__cause__
    return (spare.result(), False) if leader.cancelled() else (leader.result(), True)
