"""Jobs that read shards at known times, replayed against the real schedule: what would have been fetched?"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shardcache.plan.schedule import Schedule


class SameName:
    def key(self, name: str) -> str:
        return name

    def names(self, key: str) -> Collection[str]:
        return (key,)


@dataclass(frozen=True, slots=True)
class Read:
    """One shard taken in hand, and put down again."""

    start_s: float
    job: int
    epoch: int
    position: int
    shard: str
    end_s: float


@dataclass(frozen=True, slots=True)
class Job:
    epochs: Sequence[Sequence[str]]  # what it reads, shard by shard
    start_s: float = 0.0  # when it begins
    seconds_per_shard: float = 1.0  # from taking one shard to taking the next
    known_epochs: int = 2  # how many epochs, the present one included, its plan reaches ahead
    window: int = 1  # how many shards it has in hand at a time; at the end of an epoch none

    def reads(self, job: int) -> Iterator[Read]:
        """Yield its reads, as the job of this number."""
        start_s = self.start_s
        for number, epoch in enumerate(self.epochs):
            times_s = [start_s + position * self.seconds_per_shard for position in range(len(epoch) + 1)]
            for position, shard in enumerate(epoch):
                end_s = times_s[min(position + self.window, len(epoch))]
                yield Read(times_s[position], job, number, position, shard, end_s)
            start_s = times_s[-1]


def all_reads(jobs: Sequence[Job]) -> list[Read]:
    reads = (read for number, job in enumerate(jobs) for read in job.reads(number))
    return sorted(reads, key=lambda read: (read.start_s, read.job))


class Replay:
    """Runs jobs over a cache of so many shards, all of one size, that fetches nothing before it is asked for.

    Args:
        foreseen: whether every job tells its first plan at the beginning, and not when it begins to read.
    """

    def __init__(self, jobs: Sequence[Job], capacity: int, *, foreseen: bool = False) -> None:
        self._jobs = jobs
        self._foreseen = foreseen
        self._capacity = capacity
        self._schedule: Schedule[int] = Schedule(SameName())
        self._here: set[str] = set()
        self._in_hand: Counter[str] = Counter()
        self.fetched: list[str] = []  # the shards that had to be fetched, in order
        self.hits: dict[tuple[int, int], int] = {}  # per job and epoch, the shards that were there

    def run(self) -> "Replay":
        in_hand: list[tuple[float, int, int, str]] = []
        self._schedule.tick(min(job.start_s for job in self._jobs))
        for number in range(len(self._jobs)) if self._foreseen else ():
            self._declare(number, 0)
        for read in all_reads(self._jobs):
            while in_hand and in_hand[0][0] <= read.start_s:
                end_s, job, position, shard = heapq.heappop(in_hand)
                self._schedule.tick(end_s)
                self._schedule.done(job, position)
                self._put_down(shard)
            self._schedule.tick(read.start_s)
            self._read(read)
            heapq.heappush(in_hand, (read.end_s, read.job, read.position, read.shard))
        return self

    def _put_down(self, shard: str) -> None:
        self._in_hand[shard] -= 1
        if not self._in_hand[shard]:
            self._schedule.freed(shard)

    def _read(self, read: Read) -> None:
        if read.position == 0 and not (self._foreseen and read.epoch == 0):
            self._declare(read.job, read.epoch)
        self._schedule.waits(read.job, read.position)
        hit = read.shard in self._here
        self.hits[read.job, read.epoch] = self.hits.get((read.job, read.epoch), 0) + hit
        if not hit:
            self._fetch(read.shard)
        self._schedule.reads(read.job, read.position)
        self._in_hand[read.shard] += 1
        if self._in_hand[read.shard] == 1:
            self._schedule.held(read.shard)

    def _declare(self, number: int, epoch: int) -> None:
        job = self._jobs[number]
        self._schedule.declare(number, job.seconds_per_shard)
        for known in job.epochs[epoch : epoch + job.known_epochs]:
            self._schedule.extend(number, known)

    def _fetch(self, shard: str) -> None:
        wanted = len(self._here) + 1 - self._capacity
        victims = self._schedule.victims(wanted, self._schedule.now_s, lead_s=0.0)
        if victims is None:
            raise ValueError("every shard in the cache is in hand")
        for victim in victims:
            self._here.remove(victim)
            self._schedule.gone(victim)
        self._here.add(shard)
        self._schedule.arrived(shard, 1)
        self.fetched.append(shard)


def least_fetches(jobs: Sequence[Job], capacity: int) -> int:
    """Return how few fetches any policy could do with, by trying every choice; exponential."""
    reads = all_reads(jobs)
    states: dict[frozenset[str], int] = {frozenset(): 0}
    for number, read in enumerate(reads):
        in_hand = {other.shard for other in reads[:number] if other.end_s > read.start_s}
        following: dict[frozenset[str], int] = {}
        for state, fetches in states.items():
            for successor in _successors(state, read.shard, in_hand, capacity):
                cost = fetches + (read.shard not in state)
                following[successor] = min(cost, following.get(successor, cost))
        states = following
    return min(states.values())


def _successors(state: frozenset[str], shard: str, in_hand: set[str], capacity: int) -> Iterator[frozenset[str]]:
    if shard in state:
        yield state
    elif len(state) < capacity:
        yield state | {shard}
    else:
        for victim in state - in_hand:
            yield (state - {victim}) | {shard}
