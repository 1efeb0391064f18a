"""Division of a sequence of samples into equal spans, for ranks and for the workers of each rank. Pure.

Every sample belongs to one rank, and ranks own equally many, but for one. If they are to read equally many, the ranks
that own fewer read their last sample twice ("pad"), or those that own more leave their last out ("drop"). Either comes
at the very end of a rank's span, in the last batch of its last worker. So ranks that have taken equally many batches
have padded or dropped nothing until each has read all of its span, however often the rest is divided again before: of
an epoch, only the last division does, at most one sample fewer than it has ranks.

When a job resumes with other ranks or workers, the rests of its readers' spans are concatenated and divided again. So a
phase of an epoch is fully described by how it was divided and how far each reader came; an epoch may have any number of
phases.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Even = Literal["pad", "drop"] | None
"""Policy for a number of samples not divisible by the ranks: "pad" repeats at most `world_size - 1` samples, as many
as PyTorch's DistributedSampler; "drop" leaves out at most as many; None gives some ranks one sample more."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Division of a sequence among the readers of a job: consecutive spans, rank by rank and worker by worker.

    Readers have the numbers `rank * workers + worker`.
    """

    world_size: int
    workers: int
    even: Even = "pad"
    batch_size: int = 1  # workers' spans are whole batches of this size, except for the rank's last batch

    @property
    def readers(self) -> int:
        """Number of spans, one per reader."""
        return self.world_size * self.workers

    def rank_size(self, samples: int, rank: int) -> int:
        """Return the number of samples that a rank reads of a sequence of `samples`."""
        if self.even is None:
            start, stop = self._own(samples, rank)
            return stop - start
        return samples // self.world_size if self.even == "drop" else -(-samples // self.world_size)

    def own(self, samples: int, reader: int) -> tuple[int, int]:
        """Return start and stop of the samples that a reader owns of a sequence of `samples`."""
        rank, worker = divmod(reader, self.workers)
        start, stop = self._own(samples, rank)
        end = stop if worker + 1 == self.workers else start + self._before(samples, rank, worker + 1)
        return min(start + self._before(samples, rank, worker), stop), end

    def spans(self, samples: int, reader: int) -> list[tuple[int, int]]:
        """Return start and stop of what a reader reads: of its own samples, and of the rank's last one as padding."""
        start, stop = self.own(samples, reader)
        size, last = self.size(samples, reader), (stop - 1) % max(1, samples)
        return [(start, min(stop, start + size)), (last, max(last, last + size - (stop - start)))]

    def size(self, samples: int, reader: int) -> int:
        """Return the number of samples that a reader reads of a sequence of `samples`."""
        rank, worker = divmod(reader, self.workers)
        return self._before(samples, rank, worker + 1) - self._before(samples, rank, worker)

    def worker_sizes(self, samples: int, rank: int) -> list[int]:
        """Return `size` for each worker of a rank."""
        return [self.size(samples, rank * self.workers + worker) for worker in range(self.workers)]

    def batches(self, samples: int, rank: int, *, drop_last: bool = False) -> int:
        """Return the number of batches that a rank makes of a sequence, with the short one unless it is dropped."""
        size = self.rank_size(samples, rank)
        return size // self.batch_size if drop_last else -(-size // self.batch_size)

    def _own(self, samples: int, rank: int) -> tuple[int, int]:
        return samples * rank // self.world_size, samples * (rank + 1) // self.world_size

    def _before(self, samples: int, rank: int, worker: int) -> int:
        """Return the number of samples that a rank's workers before this one read: whole batches."""
        batches = self.batches(samples, rank)
        return min(batches * worker // self.workers * self.batch_size, self.rank_size(samples, rank))


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an epoch read by the same readers."""

    cut: Partition  # division of the samples that were left at its start
    # Number of samples of its span that each reader has passed; one per worker if it is the same on each rank.
    taken: tuple[int, ...]
    # Per reader, samples after those that it has passed as well: bits, in hexadecimal, with bit n for the n-th sample.
    beyond: tuple[str, ...] = ()  # empty if there are none


Stretch = tuple[int, int, int]
"""A first-phase reader, and start and stop of some samples of its span, in the order in which that reader reads it."""


def what_is_left(samples: int, phases: Sequence[Phase], cut: Partition) -> "Rest":
    """Return the rest of an epoch of `samples` samples after the finished phases, to be cut by `cut`."""
    rest = Rest(_spans(samples, phases[0].cut if phases else cut))
    for phase in phases:
        rest = Rest(_behind(rest, phase))
    return rest


def _spans(samples: int, cut: Partition) -> Iterator[Stretch]:
    for reader in range(cut.readers):
        start, stop = cut.own(samples, reader)
        yield reader, 0, stop - start


def _behind(rest: "Rest", phase: Phase) -> Iterator[Stretch]:
    """Yield the samples that the readers of a phase have not reached, with those that would have been dropped."""
    for reader in range(phase.cut.readers):
        start, stop = phase.cut.own(len(rest), reader)
        taken = phase.taken[reader % len(phase.taken)]
        passed = int(phase.beyond[reader] or "0", 16) if phase.beyond else 0
        for begin, end in _gaps(start + taken, stop, passed):
            yield from rest.between(begin, end)


def _gaps(start: int, stop: int, passed: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of places from `start` to `stop` not passed yet; bit n of `passed` is place `start + n`."""
    while passed and start < stop:
        left = (passed & -passed).bit_length() - 1  # places before the next passed one
        yield start, min(start + left, stop)
        start, passed = start + left, passed >> left
        run = (~passed & (passed + 1)).bit_length() - 1
        start, passed = start + run, passed >> run
    yield start, stop


class Rest:
    """The rest of an epoch: stretches, concatenated."""

    def __init__(self, parts: Iterable[Stretch]) -> None:
        self._parts = [(reader, start, stop) for reader, start, stop in parts if start < stop]
        self._ends = list(accumulate(stop - start for _, start, stop in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield the stretches between two places."""
        while start < stop:
            at = bisect_right(self._ends, start)
            reader, _, part_stop = self._parts[at]
            first, end = self._ends[at] - part_stop, min(self._ends[at], stop)
            yield reader, start - first, end - first
            start = end
