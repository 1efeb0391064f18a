"""Whose pages stay in memory when nobody reads a shard, and whose are brought in before somebody does. Pure.

The kernel drops what was used longest ago. Of a dataset larger than memory, read round after round, that is just what
is needed soonest, so nothing is ever found. The plans know better: what is needed furthest ahead goes (Belady's MIN),
so that memory keeps as much of each round as it can hold, and the rest comes from the disk before it is needed.
The furthest of a few is nearly as good as the furthest of all, and costs the same however many there are: as in Redis,
which evicts the best of a sample, but here the sample goes round, so that no shard is passed over for long.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable

_SAMPLE = 8


class PagePlan:
    """The shards whose pages should be in memory, as far as is known: the kernel takes pages without a word."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._kept_bytes = 0
        self._advised: set[str] = set()

    def __repr__(self) -> str:
        return f"PagePlan(shards={len(self._kept)}, bytes={self._kept_bytes}, read_ahead={len(self._advised)})"

    def read_ahead(self, upcoming: Iterable[str], size_of: Callable[[str], int | None], spare_bytes: int) -> list[str]:
        """Return which shards to bring into memory now; each is named once for each time that it is read.

        Args:
            upcoming: the shard that each session reads next, after the one in its hands.
            size_of: tells a shard's size in bytes, None for one that is not here.
            spare_bytes: what files may fill before memory is short. A shard that is larger is left to its reader: its
                first pages would be gone before they are read.
        """
        wanted = [key for key in dict.fromkeys(upcoming) if key not in self._advised]
        chosen = [key for key in wanted if (size := size_of(key)) is not None and size <= spare_bytes]
        self._advised.update(chosen)
        return chosen

    def let_go(self, key: str, size_bytes: int, spare_bytes: int, next_use_in_s: Callable[[str], float]) -> list[str]:
        """Return the shards whose pages to give back, now that nobody reads `key`: none, itself or others.

        Args:
            spare_bytes: what files may fill before memory is short.
            next_use_in_s: tells when a shard is needed next, infinite for one that nobody plans to read.
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
        """Note that a shard has left the cache."""
        self._kept_bytes -= self._kept.pop(key, 0)
        self._advised.discard(key)

    def _sample(self) -> list[str]:
        sample = list(itertools.islice(self._kept, _SAMPLE))
        for key in sample:
            self._kept.move_to_end(key)
        return sample
