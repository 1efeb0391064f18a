"""Reads of shards at known times, replayed without bytes: what the schedule and other policies fetch. Pure.

A shard that a reader has in hand is not evicted, whoever decides.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from shardcache.errors import CapacityError
from shardcache.plan.schedule import Schedule

Size: TypeAlias = Callable[[str], int]
_ONE: Size = lambda _: 1  # noqa: E731
_SAME_NAME: Any = SimpleNamespace(key=str, names=lambda key: (key,))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a shard takes, by its name."""

    reserved: Size = _ONE  # while it is fetched; at least `cached`
    cached: Size = _ONE


_UNITS = Sizes()


class Read(NamedTuple):
    """A shard that a session has in hand for a time, at a position of its plan of an epoch."""

    start_s: float
    session: int
    epoch: int
    position: int
    shard: str
    end_s: float


class Replay:
    """A cache that decides as the daemon does; transfers are instant, paces known.

    Plans are of `known` epochs, or with `foreseen` all are declared before the first read.

    Attributes:
        fetched: the shards in the order in which they were fetched.
        used_bytes: size of the cached shards.
        peak_bytes: the most that the cached shards and a reservation have taken together.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        capacity_bytes: int,
        sizes: Sizes = _UNITS,
        known: int = 2,
        foreseen: bool = False,
    ) -> None:
        self.fetched, self.used_bytes, self.peak_bytes = list[str](), 0, 0
        self._capacity_bytes = capacity_bytes
        self._sizes = sizes
        self._cached, self._in_hand = set[str](), Counter[str]()
        self._schedule: Schedule[int] = Schedule(_SAME_NAME)
        self._schedule.tick(reads[0].start_s)
        plans: defaultdict[tuple[int, int], list[Read]] = defaultdict(list)  # by session and epoch
        for read in reads:
            plans[read.session, read.epoch].append(read)
        for session in {read.session for read in reads} if foreseen else ():
            self._declare(session, [plans[session, 0]])
        ends: list[tuple[float, Read]] = []
        for now_s, some in groupby(reads, key=lambda read: read.start_s):
            while ends and ends[0][0] <= now_s:
                self._end(heapq.heappop(ends)[1])
            self._schedule.tick(now_s)
            for read in (present := list(some)):
                if read.position == 0 and not (foreseen and read.epoch == 0):
                    epochs = range(read.epoch, read.epoch + known)
                    self._declare(read.session, [plans.get((read.session, epoch), []) for epoch in epochs])
            for read in present:
                self._begin(read)
                heapq.heappush(ends, (read.end_s, read))
            self._fetch_ahead()

    def _declare(self, session: int, epochs: Sequence[Sequence[Read]]) -> None:
        self._schedule.declare(session, (epochs[0][-1].end_s - epochs[0][0].start_s) / len(epochs[0])).settled = True
        self._schedule.extend(session, [read.shard for reads in epochs for read in reads])

    def _begin(self, read: Read) -> None:
        self._schedule.waits(read.session, read.position)
        if read.shard not in self._cached and not self._fetch(read.shard, float("-inf")):
            raise CapacityError(
                f"the {len(+self._in_hand)} shards that a node's ranks have in hand fill its disk",
                remedy="give it ranks x (shuffle_window + 1) shards, or lower the window or the number of ranks",
            )
        self._schedule.reads(read.session, read.position)
        self._in_hand[read.shard] += 1
        self._schedule.held(read.shard)

    def _end(self, read: Read) -> None:
        self._schedule.tick(read.end_s)
        self._schedule.done(read.session, read.position)
        self._in_hand[read.shard] -= 1
        if not self._in_hand[read.shard]:
            self._schedule.freed(read.shard)
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Fetch what is needed soonest while there is space that no plan needs sooner."""
        while (gap := self._schedule.next_missing(self._cached.__contains__)) and self._fetch(*gap[:2]):
            pass

    def _fetch(self, shard: str, needed_at_s: float) -> bool:
        """Return False if that takes the space of shards that are to stay.

        As in the daemon, space is reserved before the first byte arrives, and what is left of it
        is free once the shard is cached.
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
    """Return the number of each read's next one of the same shard: the ranks of MIN (Belady 1966), for `misses`."""
    following, ranks = dict[str, int](), list[int]()
    for number, read in reversed([*enumerate(reads)]):
        ranks.append(following.get(read.shard, len(reads)))
        following[read.shard] = number
    return ranks[::-1]


def misses(
    reads: Sequence[Read],
    ranks: Sequence[int],
    capacity_bytes: int,
    sizes: Sizes = _UNITS,
) -> Iterator[str]:
    """Yield the shard of each read that misses it if the one whose last read has the highest rank is evicted."""
    cached = dict[str, int]()  # the rank of each shard's last read
    in_hand = Counter[str]()
    used_bytes = 0
    heap = list[tuple[int, str]]()  # what is in it and in a hand is stale
    ends = list[tuple[float, str]]()
    for read, rank in zip(reads, ranks, strict=True):
        while ends and ends[0][0] <= read.start_s:
            _, shard = heapq.heappop(ends)
            in_hand[shard] -= 1
            heapq.heappush(heap, (-cached[shard], shard))

        is_miss = read.shard not in cached
        cached[read.shard] = rank
        in_hand[read.shard] += 1
        heapq.heappush(ends, (read.end_s, read.shard))
        if not is_miss:
            continue

        yield read.shard
        free_bytes = capacity_bytes - sizes.reserved(read.shard)
        while used_bytes > free_bytes and heap:
            negative, shard = heapq.heappop(heap)
            if cached.get(shard) == -negative and not in_hand[shard]:
                del cached[shard]
                used_bytes -= sizes.cached(shard)
        used_bytes += sizes.cached(read.shard)
