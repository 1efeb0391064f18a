"""Division of an epoch into equal spans, one for each rank. Pure.

Every sample belongs to one rank, and the numbers of samples of two ranks differ by one at most. If
all are to read equally many, the ranks that own fewer read their last sample twice ("pad"), or
those that own more leave their last out ("drop"). Either happens at the very end of a rank's span,
in its last batch: ranks that have taken equally many batches have padded or dropped nothing until
they reach it. So however often the rest of an epoch is divided again, only the last division pads
or drops, at most `world_size - 1` samples.

When a job resumes with other ranks, the rests of their spans are concatenated and divided again. So
a phase of an epoch is fully described by how it was divided and how far each rank came; an epoch
may have any number of phases. Where samples have no numbers, the workers of a plain DataLoader read
independently of each other, and the epoch is divided among them as it otherwise is among ranks.
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
            start, stop = self.owned_span(samples, rank)
            return stop - start
        if self.even == "drop":
            return samples // self.world_size
        return -(-samples // self.world_size)

    def owned_span(self, samples: int, rank: int) -> tuple[int, int]:
        """Return start and stop of the samples that a rank owns of a sequence of `samples`."""
        start = samples * rank // self.world_size
        stop = samples * (rank + 1) // self.world_size
        return start, stop

    def spans(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return start and stop of each span that a rank reads.

        They are its own samples, and its last one again as padding.
        """
        start, stop = self.owned_span(samples, rank)
        size = self.size(samples, rank)
        missing = max(0, size - (stop - start))
        # If the first rank owns none, it is padded with the last sample of the sequence.
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
        taken: number of samples at the start of its span that each reader has passed; a single
            number if it is the same for all.
        beyond: per reader, further samples that it has passed: bits, in hexadecimal, with bit n for
            sample n of those after `taken`. Empty if there are none.
    """

    cut: Partition
    taken: tuple[int, ...]
    beyond: tuple[str, ...] = ()


Stretch = tuple[int, int, int]
"""A reader of the first phase, and start and stop of samples in the order of its span."""


def rest_after(samples: int, phases: Sequence[Phase], cut: Partition) -> "Rest":
    """Return the rest of an epoch after some phases.

    Args:
        samples: of the whole epoch.
        phases: those that have been read.
        cut: division of the epoch, if no phase has been read.
    """
    first = phases[0].cut if phases else cut
    rest = Rest(_whole_spans(samples, first))
    for phase in phases:
        rest = Rest(_unread(rest, phase))
    return rest


def _whole_spans(samples: int, cut: Partition) -> Iterator[Stretch]:
    """Yield the span of each reader of an undivided epoch."""
    for reader in range(cut.world_size):
        start, stop = cut.owned_span(samples, reader)
        yield reader, 0, stop - start


def _unread(rest: "Rest", phase: Phase) -> Iterator[Stretch]:
    """Yield the samples that the readers of a phase have not passed.

    Those that would have been dropped are among them.
    """
    for reader in range(phase.cut.world_size):
        start, stop = phase.cut.owned_span(len(rest), reader)
        taken = phase.taken[reader % len(phase.taken)]  # the only one, if it is the same for all
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
        gap = _trailing_zeros(passed)
        yield start, min(start + gap, stop)
        start += gap
        passed >>= gap

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
