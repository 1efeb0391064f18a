"""Reads of shards at known times, replayed without bytes, under the schedule and others. Pure.

A shard that a reader has leased is not evicted, whatever decides.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

from shardcache.errors import CapacityError
from shardcache.plan.schedule import SameName, Schedule

Size: TypeAlias = Callable[[str], int]
_NOW = float("-inf")  # time of need of a shard that a reader waits for: before anything planned


def _one_unit(shard: str) -> int:
    """Return the size of any shard in a cache whose capacity is a number of shards."""
    return 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a shard takes, by its name."""

    reserved: Size = _one_unit  # while the shard is fetched; at least `cached`
    cached: Size = _one_unit


_UNITS = Sizes()


class Read(NamedTuple):
    """A session's lease on a shard for a time, at a position of its plan of an epoch."""

    start_s: float
    session: int
    epoch: int
    position: int
    shard: str
    end_s: float


class Replay:
    """A cache that decides as the daemon does; transfers are instant, paces known.

    All reads are played when it is made.

    Args:
        reads: in the order in which they begin.
        capacity_bytes: capacity of the cache.
        sizes: sizes of the shards.
        known_epochs: number of epochs that a plan has: the present one, and those after it.
        declare_first_epochs: True to declare the first epochs of all sessions before the first
            read.

    Raises CapacityError if the shards that are read at the same time do not fit.

    Attributes:
        fetched: the shards in the order in which they were fetched.
        used_bytes: size of the cached shards.
        peak_bytes: maximum size of the cached shards and a reservation together.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        capacity_bytes: int,
        sizes: Sizes = _UNITS,
        known_epochs: int = 2,
        *,
        declare_first_epochs: bool = False,
    ) -> None:
        self.fetched: list[str] = []
        self.used_bytes = 0
        self.peak_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._sizes = sizes
        self._known_epochs = known_epochs
        self._declares_first_epochs = declare_first_epochs
        self._cached: set[str] = set()
        self._leases: Counter[str] = Counter()  # by shard
        self._schedule: Schedule[int] = Schedule(SameName())
        self._plans: defaultdict[tuple[int, int], list[Read]] = defaultdict(list)
        for read in reads:
            self._plans[read.session, read.epoch].append(read)
        self._run(reads)

    def _run(self, reads: Sequence[Read]) -> None:
        """Play all reads; those that begin together are declared before any of them fetches."""
        self._schedule.tick(reads[0].start_s)
        if self._declares_first_epochs:
            for session in {read.session for read in reads}:
                self._declare(session, [self._plans[session, 0]])
        ends: list[tuple[float, Read]] = []
        for now_s, group in groupby(reads, key=lambda read: read.start_s):
            while ends:
                end_s, read = ends[0]
                if end_s > now_s:
                    break
                heapq.heappop(ends)
                self._end(read)
            self._schedule.tick(now_s)
            beginning = list(group)
            for read in beginning:
                self._declare_epochs(read)
            for read in beginning:
                self._begin(read)
                heapq.heappush(ends, (read.end_s, read))
            self._fetch_ahead()

    def _declare_epochs(self, read: Read) -> None:
        """Declare the known epochs at the first read of an epoch, unless that is done already."""
        is_declared = self._declares_first_epochs and read.epoch == 0
        if read.position == 0 and not is_declared:
            epochs = range(read.epoch, read.epoch + self._known_epochs)
            plans = [self._plans.get((read.session, epoch), []) for epoch in epochs]
            self._declare(read.session, plans)

    def _declare(self, session: int, epochs: Sequence[Sequence[Read]]) -> None:
        """Declare a session's plan of some epochs, at the pace of the first."""
        present = epochs[0]
        took_s = present[-1].end_s - present[0].start_s
        plan = self._schedule.declare(session, took_s / len(present))
        plan.settled = True  # the pace that was declared is that of all its reads
        self._schedule.extend(session, [read.shard for reads in epochs for read in reads])

    def _begin(self, read: Read) -> None:
        self._schedule.waits(read.session, read.position)
        if read.shard not in self._cached and not self._fetch(read.shard, needed_at_s=_NOW):
            leased = sum(1 for leases in self._leases.values() if leases)
            raise CapacityError(
                f"a node's disk is full with the {leased} shards that its ranks are reading",
                remedy="give the disk space for ranks x (shuffle_window + 1) shards, or "
                "lower the window or the number of ranks",
            )
        self._schedule.reads(read.session, read.position)
        self._leases[read.shard] += 1
        self._schedule.held(read.shard)

    def _end(self, read: Read) -> None:
        self._schedule.tick(read.end_s)
        self._schedule.done(read.session, read.position)
        self._leases[read.shard] -= 1
        if not self._leases[read.shard]:
            self._schedule.freed(read.shard)
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Fetch the shards needed soonest, while there is space that no plan needs sooner."""
        while True:
            missing = self._schedule.next_missing(self._cached.__contains__)
            if missing is None or not self._fetch(missing.name, missing.needed_at_s):
                return

    def _fetch(self, shard: str, needed_at_s: float) -> bool:
        """Fetch a shard; return False if that takes the space of shards that are to stay.

        As in the daemon, space is reserved before the first byte arrives, and unused space of the
        reservation is free once the shard is cached.
        """
        reserved_bytes = self._sizes.reserved(shard)
        shortfall_bytes = self.used_bytes + reserved_bytes - self._capacity_bytes
        victims = self._schedule.victims(shortfall_bytes, needed_at_s, lead_s=0.0)
        if victims is None:
            return False

        for victim in victims:
            self._cached.remove(victim)
            self._schedule.gone(victim)
            self.used_bytes -= self._sizes.cached(victim)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + reserved_bytes)

        cached_bytes = self._sizes.cached(shard)
        self._cached.add(shard)
        self._schedule.arrived(shard, cached_bytes)
        self.used_bytes += cached_bytes
        self.fetched.append(shard)
        return True


def furthest_next(reads: Sequence[Read]) -> Sequence[int]:
    """Return, for each read, the number of the next read of the same shard.

    These are the ranks of MIN (Belady 1966), for `misses`.
    """
    following: dict[str, int] = {}  # by shard, the number of its next read
    ranks: list[int] = []  # last read first
    for number in reversed(range(len(reads))):
        shard = reads[number].shard
        ranks.append(following.get(shard, len(reads)))
        following[shard] = number
    ranks.reverse()
    return ranks


def misses(
    reads: Sequence[Read],
    ranks: Sequence[int],
    capacity_bytes: int,
    sizes: Sizes = _UNITS,
) -> Iterator[str]:
    """Yield the shard of each read that finds it missing, if highest ranks are evicted first.

    Args:
        reads: in the order in which they begin.
        ranks: a rank for each read; a shard has that of its last read.
        capacity_bytes: capacity of the cache.
        sizes: sizes of the shards.
    """
    cached: dict[str, int] = {}  # the rank of each shard's last read
    leases: Counter[str] = Counter()
    used_bytes = 0
    heap: list[tuple[int, str]] = []  # negative ranks; an entry of a leased shard is stale
    ends: list[tuple[float, str]] = []
    for read, rank in zip(reads, ranks, strict=True):
        while ends:
            end_s, shard = ends[0]
            if end_s > read.start_s:
                break
            heapq.heappop(ends)
            leases[shard] -= 1
            heapq.heappush(heap, (-cached[shard], shard))

        is_miss = read.shard not in cached
        cached[read.shard] = rank
        leases[read.shard] += 1
        heapq.heappush(ends, (read.end_s, read.shard))
        if not is_miss:
            continue

        yield read.shard
        free_bytes = capacity_bytes - sizes.reserved(read.shard)
        while used_bytes > free_bytes and heap:
            negative_rank, shard = heapq.heappop(heap)
            if cached.get(shard) == -negative_rank and not leases[shard]:
                del cached[shard]
                used_bytes -= sizes.cached(shard)
        used_bytes += sizes.cached(read.shard)
