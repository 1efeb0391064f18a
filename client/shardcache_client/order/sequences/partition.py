"""Division of an epoch into equal spans, one for each rank. Pure.

Every sample belongs to one rank, and ranks own equally many, but for one. If they are to read
equally many, the ranks that own fewer read their last sample twice ("pad"), or those that own more
leave their last out ("drop"). Either comes at the very end of a rank's span, in its last batch. So
ranks that have taken equally many batches have padded or dropped nothing until
each has read all of its span, however often the rest is divided again before: of an epoch, only the
last division does, at most one sample fewer than it has ranks.

When a job resumes with other ranks, the rests of their spans are concatenated and divided again. So
a phase of an epoch is fully described by how it was divided and how far each rank came; an epoch
may have any number of phases. Readers of their own, such as the workers of a plain DataLoader where
samples have no numbers, are divided as ranks are.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Even = Literal["pad", "drop"] | None
"""Policy for a number of samples not divisible by the ranks.

"pad" repeats at most `world_size - 1` samples, as many as PyTorch's DistributedSampler; "drop"
leaves out at most as many; None gives some ranks one sample more.
"""


@dataclass(frozen=True, slots=True)
class Partition:
    """Division of a sequence among the ranks of a job, which have consecutive spans.

    Attributes:
        world_size: number of ranks.
        even: policy for a number of samples that the ranks do not divide.
        batch_size: number of samples in a batch of each rank.
    """

    world_size: int
    even: Even = "pad"
    batch_size: int = 1

    def size(self, samples: int, rank: int) -> int:
        """Return the number of samples that a rank reads of a sequence of `samples`."""
        if self.even is None:
            start, stop = self.own(samples, rank)
            return stop - start
        if self.even == "drop":
            return samples // self.world_size
        return -(-samples // self.world_size)

    def own(self, samples: int, rank: int) -> tuple[int, int]:
        """Return start and stop of the samples that a rank owns of a sequence of `samples`."""
        start = samples * rank // self.world_size
        stop = samples * (rank + 1) // self.world_size
        return start, stop

    def spans(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return start and stop of each span that a rank reads.

        They are its own samples, and its last one again as padding.
        """
        start, stop = self.own(samples, rank)
        size = self.size(samples, rank)
        missing = max(0, size - (stop - start))
        last = (stop - 1) % max(1, samples)
        return [(start, min(stop, start + size)), (last, last + missing)]

    def batches(self, samples: int, rank: int, *, drop_last: bool = False) -> int:
        """Return the number of batches that a rank makes of a sequence of `samples`.

        Args:
            samples: in the sequence.
            rank: number of the rank.
            drop_last: True if its last batch does not count unless it is whole.
        """
        size = self.size(samples, rank)
        if drop_last:
            return size // self.batch_size
        return -(-size // self.batch_size)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an epoch read by the same readers.

    Attributes:
        cut: division of the samples that were left at its start.
        taken: number of samples of its span that each reader has passed; a single one if it is the
            same for all.
        beyond: per reader, samples after those that it has passed as well: bits, in hexadecimal,
            with bit n for the n-th sample. Empty if there are none.
    """

    cut: Partition
    taken: tuple[int, ...]
    beyond: tuple[str, ...] = ()


Stretch = tuple[int, int, int]
"""A first-phase reader, and start and stop of some samples of its span.

They are in the order in which that reader reads them.
"""


def what_is_left(samples: int, phases: Sequence[Phase], cut: Partition) -> "Rest":
    """Return the rest of an epoch after some phases.

    Args:
        samples: of the whole epoch.
        phases: those that have been read.
        cut: division of the rest.
    """
    first = phases[0].cut if phases else cut
    rest = Rest(_spans(samples, first))
    for phase in phases:
        rest = Rest(_behind(rest, phase))
    return rest


def _spans(samples: int, cut: Partition) -> Iterator[Stretch]:
    for reader in range(cut.world_size):
        start, stop = cut.own(samples, reader)
        yield reader, 0, stop - start


def _behind(rest: "Rest", phase: Phase) -> Iterator[Stretch]:
    """Yield the samples that the readers of a phase have not reached.

    Those that would have been dropped are among them.
    """
    for reader in range(phase.cut.world_size):
        start, stop = phase.cut.own(len(rest), reader)
        taken = phase.taken[reader % len(phase.taken)]
        passed = 0
        if phase.beyond:
            passed = int(phase.beyond[reader] or "0", 16)
        for begin, end in _gaps(start + taken, stop, passed):
            yield from rest.between(begin, end)


def _gaps(start: int, stop: int, passed: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the runs of places, from `start` to `stop`, not passed yet.

    Bit n of `passed` is 1 if the place `start + n` has been passed.
    """
    while passed and start < stop:
        left = _trailing_zeros(passed)
        yield start, min(start + left, stop)
        start += left
        passed >>= left

        run = _trailing_zeros(~passed)
        start += run
        passed >>= run
    yield start, stop


def _trailing_zeros(bits: int) -> int:
    lowest_one = bits & -bits
    return lowest_one.bit_length() - 1


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
            end = min(stop, self._ends[at])
            to_span = part_stop - self._ends[at]  # from a place of the rest to the reader's own
            yield reader, start + to_span, end + to_span
            start = end
