"""Page cache planning: shards whose pages to keep, to drop, and to read ahead. Pure.

The kernel drops the least recently used pages. For a dataset larger than memory, read epoch after epoch, those are the
ones needed soonest, so reads never hit the page cache. The plans allow better: drop the shard needed furthest ahead
(Belady's MIN), so that memory keeps as much of each epoch as it can hold, and read the rest from disk before it is
needed. The furthest of a sample is nearly as good as the furthest of all, at a cost independent of their number: as in
Redis, which evicts the best of a sample, except that the sample rotates here, so that every shard is considered soon.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable

_SAMPLE = 8


class PagePlan:
    """The shards whose pages should be in memory; an estimate, since the kernel reclaims pages without notice."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._kept_bytes = 0
        self._advised: set[str] = set()

    def __repr__(self) -> str:
        return f"PagePlan(shards={len(self._kept)}, bytes={self._kept_bytes}, read_ahead={len(self._advised)})"

    def read_ahead(self, upcoming: Iterable[str], size_of: Callable[[str], int | None], spare_bytes: int) -> list[str]:
        """Return the shards to read into memory now; each is returned once per time that it is read.

        Args:
            upcoming: the shard that each session reads after its current one.
            size_of: returns a shard's size in bytes, or None if it is not cached.
            spare_bytes: bytes that file pages may fill before memory is short. A larger shard is not read ahead: its
                first pages would be reclaimed before they are read.
        """
        wanted = [key for key in dict.fromkeys(upcoming) if key not in self._advised]
        chosen = [key for key in wanted if (size := size_of(key)) is not None and size <= spare_bytes]
        self._advised.update(chosen)
        return chosen

    def let_go(self, key: str, size_bytes: int, spare_bytes: int, next_use_in_s: Callable[[str], float]) -> list[str]:
        """Return the shards whose pages to drop, now that no reader uses `key`: none, itself or others.

        Args:
            spare_bytes: bytes that file pages may fill before memory is short.
            next_use_in_s: returns when a shard is needed next, infinite if no plan contains it.
        """
        self.gone(key)
        self._kept[key] = size_bytes
        self._kept_bytes += size_bytes
        going = []
        while self._kept_bytes > spare_bytes and self._kept:
            sample = self._sample() + [key] * (key in self._kept)
            going.append(max(sample, key=next_use_in_s))
            self.gone(going[-1])
        return going

    def gone(self, key: str) -> None:
        """Forget a shard that was removed from the cache."""
        self._kept_bytes -= self._kept.pop(key, 0)
        self._advised.discard(key)

    def _sample(self) -> list[str]:
        sample = list(itertools.islice(self._kept, _SAMPLE))
        for key in sample:
            self._kept.move_to_end(key)
        return sample
