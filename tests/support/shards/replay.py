"""Jobs that read shards at known times, and the fewest fetches that any policy could do with."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shardcache.plan.replay import Read


class SameName:
    def key(self, name: str) -> str:
        return name

    def names(self, key: str) -> Collection[str]:
        return (key,)


@dataclass(frozen=True, slots=True)
class Job:
    epochs: Sequence[Sequence[str]]  # what it reads, shard by shard
    start_s: float = 0.0  # when it begins
    seconds_per_shard: float = 1.0  # from taking one shard to taking the next
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
    return sorted(read for number, job in enumerate(jobs) for read in job.reads(number))


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
