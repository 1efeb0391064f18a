"""What a cache keeps, by other rules than ours: each policy under the same reads, the same capacity and the same pins.

All shards are of one size, and one that a reader has in hand cannot go, whoever decides.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from shardcache.plan.sieve import Sieve
from support.replay import Read


class Policy(Protocol):
    """Decides who goes."""

    def use(self, number: int, shard: str) -> None:
        """Note that the read of that number takes a shard in hand, which is in the cache by now."""

    def evict(self, in_hand: Collection[str]) -> str:
        """Choose a shard that is not in hand; it is gone when this returns."""


class LRU:
    """The least recently used goes."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def use(self, number: int, shard: str) -> None:
        self._order[shard] = None
        self._order.move_to_end(shard)

    def evict(self, in_hand: Collection[str]) -> str:
        victim = next(shard for shard in self._order if shard not in in_hand)
        del self._order[victim]
        return victim


class SieveOnly:
    """SIEVE for all shards; the daemon has it for those that nobody plans."""

    def __init__(self) -> None:
        self._queue = Sieve()

    def use(self, number: int, shard: str) -> None:
        if shard in self._queue:
            self._queue.visit(shard)
        else:
            self._queue.add(shard)

    def evict(self, in_hand: Collection[str]) -> str:
        victim = next(shard for shard in self._queue.order() if shard not in in_hand)
        self._queue.discard(victim)
        return victim


class StaticSubset:
    """The first shards to come stay for ever; the others pass through the room that is left.

    Args:
        kept: how many stay.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._stay: set[str] = set()
        self._passing: OrderedDict[str, None] = OrderedDict()

    def use(self, number: int, shard: str) -> None:
        if len(self._stay) < self._kept:
            self._stay.add(shard)
        elif shard not in self._stay:
            self._passing[shard] = None

    def evict(self, in_hand: Collection[str]) -> str:
        victim = next(shard for shard in self._passing if shard not in in_hand)
        del self._passing[victim]
        return victim


class OfflineMin:
    """What is read again last, or never, goes; it knows all reads that will ever be.

    L. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self._next = _next_reads([read.shard for read in reads])
        self._here: dict[str, int] = {}

    def use(self, number: int, shard: str) -> None:
        self._here[shard] = self._next[number]

    def evict(self, in_hand: Collection[str]) -> str:
        victim = max(self._here.keys() - set(in_hand), key=self._here.__getitem__)
        del self._here[victim]
        return victim


def _next_reads(shards: Sequence[str]) -> list[int]:
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
    for number, read in enumerate(reads):
        while in_hand and in_hand[0][0] <= read.start_s:
            heapq.heappop(in_hand)
        found[read.job, read.epoch] += read.shard in here
        if read.shard not in here:
            if len(here) == capacity:
                here.remove(policy.evict({shard for _, shard in in_hand}))
            here.add(read.shard)
        policy.use(number, read.shard)
        heapq.heappush(in_hand, (read.end_s, read.shard))
    return found
