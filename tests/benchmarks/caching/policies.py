"""Eviction policies to compare ours with: each under the same reads, the same capacity and the same shards in hand.

All shards are of one size, and one that a reader has in hand cannot go, whoever decides. Unlike in the daemon, a policy
decides about all shards here: there are no plans.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from support.shards.replay import Read


class Policy(Protocol):
    """Eviction order of the shards in a cache; `plan/sieve.py` says what each call means."""

    def arrived(self, key: str, *, used: bool = False) -> None: ...

    def used(self, key: str) -> None: ...

    def gone(self, key: str) -> None: ...

    def victims(self) -> Iterator[str]: ...


class FIFO(dict[str, None]):
    def arrived(self, key: str, *, used: bool = False) -> None:
        self[key] = None

    def used(self, key: str) -> None:
        pass

    def gone(self, key: str) -> None:
        self.pop(key, None)

    def victims(self) -> Iterator[str]:
        return iter(self)


class LRU(FIFO):
    def used(self, key: str) -> None:
        self[key] = self.pop(key)


class StaticSubset(FIFO):
    """The first shards to come stay; the others pass through the rest of the space. `kept`: how many stay."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self._kept = kept

    def victims(self) -> Iterator[str]:
        return islice(self, self._kept, None)


class OfflineMin(dict[str, int]):
    """The shard whose next read is the furthest, or that is not read again, goes; it knows all reads in advance.

    L. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__()
        self._next = iter(next_reads([read.shard for read in reads]))

    def arrived(self, key: str, *, used: bool = False) -> None:
        self[key] = next(self._next)

    def used(self, key: str) -> None:
        self[key] = next(self._next)

    def gone(self, key: str) -> None:
        self.pop(key, None)

    def victims(self) -> Iterator[str]:
        return iter(sorted(self, key=self.__getitem__, reverse=True))


def next_reads(shards: Sequence[str]) -> list[int]:
    """Return for each read the number of the next one of its shard, or one beyond all."""
    following: dict[str, int] = {}
    found = [len(shards)] * len(shards)
    for number in range(len(shards) - 1, -1, -1):
        found[number] = following.get(shards[number], len(shards))
        following[shards[number]] = number
    return found


def hits(policy: Policy, reads: Sequence[Read], capacity: int) -> Counter[tuple[int, int]]:
    """Return how many reads found their shard, per job and epoch, as `Replay.hits` has them.

    Args:
        reads: in order of time; more may never be in hand at once than `capacity`.
        capacity: how many shards the cache has room for.
    """
    here: set[str] = set()
    in_hand: list[tuple[float, str]] = []
    found: Counter[tuple[int, int]] = Counter()
    for read in reads:
        while in_hand and in_hand[0][0] <= read.start_s:
            heapq.heappop(in_hand)
        found[read.job, read.epoch] += read.shard in here
        if read.shard in here:
            policy.used(read.shard)
        else:
            if len(here) == capacity:
                held = {shard for _, shard in in_hand}
                victim = next(shard for shard in policy.victims() if shard not in held)
                policy.gone(victim)
                here.remove(victim)
            policy.arrived(read.shard)
            here.add(read.shard)
        heapq.heappush(in_hand, (read.end_s, read.shard))
    return found
