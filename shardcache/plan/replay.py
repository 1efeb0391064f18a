"""Reads of shards at known times, replayed without bytes, by several eviction rules. Pure.

`shardcache simulate` computes from this how many shards a training would fetch. `Replay` decides as
the daemon does, by `Schedule`. For comparison, `misses` evicts the shard with the highest rank, a
number that another rule gives each read. A leased shard is one that a reader is reading. It is
never evicted.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

from shardcache.plan.reader_plan import NOW
from shardcache.plan.schedule import SameName, Schedule
from shardcache.shared.exceptions import CapacityError

Size: TypeAlias = Callable[[str], int]
"""Function that returns the number of bytes of a shard, by its name."""


def _one_unit(shard: str) -> int:
    """Return the size of a shard for a cache whose capacity is given as a number of shards."""
    return 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of bytes that shards take.

    Attributes:
        reserved: bytes reserved while the shard is fetched, which are at least those of `cached`.
        cached: bytes that the shard takes once it is cached.
    """

    reserved: Size = _one_unit
    cached: Size = _one_unit


_UNITS = Sizes()


class Read(NamedTuple):
    """A session's lease on a shard, from its start to its end.

    Attributes:
        start_s: time at which the lease begins.
        session: number of the session.
        epoch: number of the epoch.
        position: position of the shard in the session's plan of this epoch.
        shard: name of the shard.
        end_s: time at which the lease ends.
    """

    start_s: float
    session: int
    epoch: int
    position: int
    shard: str
    end_s: float


class Replay:
    """A cache that decides as the daemon does, while transfers take no time and paces are known.

    The constructor plays all reads.

    Args:
        reads: the reads, in the order in which they begin.
        capacity_bytes: capacity of the cache.
        sizes: sizes of the shards.
        known_epochs: number of epochs that a plan has, the present one included.
        declare_first_epochs: True to declare the first epochs of all sessions before the first
            read.

    Raises CapacityError if the shards that are read at the same time do not fit.

    Attributes:
        fetched: names of the shards in the order in which they were fetched.
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
        self._leases: Counter[str] = Counter()  # number of leases, by shard
        self._schedule: Schedule[int] = Schedule(SameName())
        # The reads of each plan, by session and epoch.
        self._plans: defaultdict[tuple[int, int], list[Read]] = defaultdict(list)
        for read in reads:
            self._plans[read.session, read.epoch].append(read)
        self._run(reads)

    def _run(self, reads: Sequence[Read]) -> None:
        """Play all reads.

        If several reads begin at the same time, the plans of all are declared before the first of
        them fetches.
        """
        self._schedule.tick(reads[0].start_s)
        if self._declares_first_epochs:
            for session in {read.session for read in reads}:
                self._declare(session, [self._plans[session, 0]])
        ends: list[tuple[float, Read]] = []  # heap of the reads that have begun, by their ends
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
        """Declare the known epochs at a session's first read of an epoch.

        No-op for any other read, and for a first epoch that was declared before all reads.
        """
        is_declared = self._declares_first_epochs and read.epoch == 0
        if read.position == 0 and not is_declared:
            epochs = range(read.epoch, read.epoch + self._known_epochs)
            # The epochs after the last one are empty.
            plans = [self._plans.get((read.session, epoch), []) for epoch in epochs]
            self._declare(read.session, plans)

    def _declare(self, session: int, epochs: Sequence[Sequence[Read]]) -> None:
        """Declare a session's plan of some epochs, with the pace of the first of them."""
        present = epochs[0]
        took_s = present[-1].end_s - present[0].start_s
        plan = self._schedule.declare(session, took_s / len(present))
        plan.settled = True  # the declared pace is the true one, so it need not be estimated
        self._schedule.extend(session, [read.shard for reads in epochs for read in reads])

    def _begin(self, read: Read) -> None:
        """Begin a read: fetch its shard if it is missing, and lease the shard."""
        self._schedule.waits(read.session, read.position)
        if read.shard not in self._cached and not self._fetch(read.shard, needed_at_s=NOW):
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
        """End a read: its shard may be evicted if no other session reads it."""
        self._schedule.tick(read.end_s)
        self._schedule.done(read.session, read.position)
        self._leases[read.shard] -= 1
        if not self._leases[read.shard]:
            self._schedule.freed(read.shard)
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Fetch missing shards, the soonest need first, until the next one finds no space.

        There is space where nothing is cached, or a shard that is needed later.
        """
        while True:
            missing = self._schedule.next_missing(self._cached.__contains__)
            if missing is None or not self._fetch(missing.name, missing.needed_at_s):
                return

    def _fetch(self, shard: str, needed_at_s: float) -> bool:
        """Fetch a shard; return False if that would take the space of shards that have to stay.

        As in the daemon, space is reserved before the first byte arrives. If the cached shard is
        smaller than the reservation, the rest is free again.
        """
        reserved_bytes = self._sizes.reserved(shard)
        shortfall_bytes = self.used_bytes + reserved_bytes - self._capacity_bytes
        # There is no lead time, as transfers take no time here.
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
    """Return the ranks by which `misses` evicts the shard whose next read is furthest ahead.

    This is MIN (Belady 1966). The rank of a read is the number of the next read of the same shard;
    if there is none, it is the count of all reads.
    """
    following: dict[str, int] = {}  # by shard, the number of its next read
    ranks: list[int] = []  # the rank of the last read comes first
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
    """Yield the shard of each read that finds it missing, if the highest rank is evicted first.

    Args:
        reads: the reads, in the order in which they begin.
        ranks: the rank of each read; a shard has that of its last read.
        capacity_bytes: capacity of the cache.
        sizes: sizes of the shards.
    """
    cached: dict[str, int] = {}  # by cached shard, the rank of its last read
    leases: Counter[str] = Counter()  # number of leases, by shard
    used_bytes = 0
    # Heap of the negative ranks of shards, each added when a lease ended. An entry is stale if its
    # shard is leased, or has been read again.
    heap: list[tuple[int, str]] = []
    ends: list[tuple[float, str]] = []  # heap of the reads that have begun, by their ends
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
        # Once the heap is empty, all other shards are leased, and may exceed the capacity.
        while used_bytes > free_bytes and heap:
            negative_rank, shard = heapq.heappop(heap)
            if cached.get(shard) == -negative_rank and not leases[shard]:
                del cached[shard]
                used_bytes -= sizes.cached(shard)
        used_bytes += sizes.cached(read.shard)
