"""Division of an epoch into equal spans, one for each rank. Pure.

`dealing` calls it to find each reader's share, and `sources.courses` to find what ranks have left.

- A span is the consecutive samples of the epoch that belong to one rank.
- A phase is a part of an epoch that was read by the same ranks. Another phase begins when the job
  resumes with another number of ranks.
- A rank has passed the samples that it has yielded or skipped.
- The rest is the samples that no phase has passed.

Every sample belongs to one rank, and the numbers of samples of two ranks differ by one at most. Of
10 samples, three ranks own 0 to 2, 3 to 5 and 6 to 9. If all ranks are to read equally many, the
ranks that own fewer read their last sample twice ("pad": 2 and 5 come again), or the ranks that own
more leave out their last sample ("drop": 9 is left out). Either happens in the last batch of a
rank. A job that resumes before this batch divides the rest again. So however often an epoch is
divided, only the last division pads or drops, at most `world_size - 1` samples.

When a job resumes with other ranks, the rests of the spans are concatenated and divided again. If
two ranks have each read 2 of their 5 samples, the 6 others are divided: three ranks then read
samples 2 and 3 of the first span; 4 of the first and 2 of the second; 3 and 4 of the second. So a
phase is fully described by how it was divided and how far each rank came. An epoch may have any
number of phases.

A reader is a rank here. Where the shards' numbers of samples are unknown, the workers of a plain
DataLoader read independently of each other: then each worker is a reader, as a rank is otherwise.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Even = Literal["pad", "drop"] | None
"""Policy for a number of samples that is not divisible by the number of ranks.

"pad" repeats at most `world_size - 1` samples, as many as PyTorch's DistributedSampler. "drop"
leaves out at most `world_size - 1` samples. None gives some ranks one sample more than others.
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
        """Return start and stop of what a rank reads: of its own samples, and of its padding.

        Either may be empty. The padding is the rank's last sample again.
        """
        start, stop = self.owned_span(samples, rank)
        size = self.size(samples, rank)
        padding = max(0, size - (stop - start))
        # A rank that owns no samples is padded with the sample before its span. There is none
        # before the first rank's span, which is padded with the last sample of the sequence.
        last = (stop - 1) % max(1, samples)
        return [(start, min(stop, start + size)), (last, last + padding)]

    def batches(self, samples: int, rank: int, *, drop_last: bool = False) -> int:
        """Return the number of batches that a rank makes of a sequence of `samples`.

        Args:
            samples: number of samples in the sequence.
            rank: number of the rank.
            drop_last: True to leave out the rank's last batch unless it is whole.
        """
        size = self.size(samples, rank)
        if drop_last:
            return size // self.batch_size
        return -(-size // self.batch_size)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an epoch read by the same readers.

    A reader that gets batches from several DataLoader workers may have passed some samples but not
    all before them: these are in `beyond`. With `taken` 2 and `beyond` "5", whose bits 0 and 2 are
    set, it has passed the samples 0 and 1 of its span, and also 2 and 4.

    Attributes:
        partition: division of the samples that were left when the phase began.
        taken: for each reader, the number of samples at the start of its span that it has passed; a
            single number if it is the same for all readers.
        beyond: for each reader, further samples that it has passed, as bits in hexadecimal: bit n
            is set if sample n after the first `taken` samples has been passed. Empty if no reader
            has passed such samples.
    """

    partition: Partition
    taken: tuple[int, ...]
    beyond: tuple[str, ...] = ()


Stretch = tuple[int, int, int]
"""The number of a reader of the first phase, and start and stop of samples in that reader's span.

The samples are numbered from 0 in the span's order, which later phases keep.
"""


def rest_after(samples: int, phases: Sequence[Phase], partition: Partition) -> "Rest":
    """Return the rest of an epoch after some phases.

    Args:
        samples: number of samples of the whole epoch.
        phases: phases that have been read, in order.
        partition: division of the epoch if no phase has been read; unused otherwise.
    """
    first = phases[0].partition if phases else partition
    rest = Rest(_whole_spans(samples, first))
    for phase in phases:
        rest = Rest(_unread(rest, phase))
    return rest


def _whole_spans(samples: int, partition: Partition) -> Iterator[Stretch]:
    """Yield the span of each reader of an undivided epoch."""
    for reader in range(partition.world_size):
        start, stop = partition.owned_span(samples, reader)
        yield reader, 0, stop - start


def _unread(rest: "Rest", phase: Phase) -> Iterator[Stretch]:
    """Yield the samples that the readers of a phase have not passed.

    Samples that the phase would have dropped at its end are among them.

    Args:
        rest: the samples that were left when the phase began.
        phase: the phase.
    """
    for reader in range(phase.partition.world_size):
        start, stop = phase.partition.owned_span(len(rest), reader)
        # `taken` may be a single number for all readers: then the index is always 0.
        taken = phase.taken[reader % len(phase.taken)]
        passed = 0
        if phase.beyond:
            passed = int(phase.beyond[reader] or "0", 16)
        for begin, end in _gaps(start + taken, stop, passed):
            yield from rest.between(begin, end)


def _gaps(start: int, stop: int, passed: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each run of places, from `start` to `stop`, that are not passed yet.

    A run is empty if its start is not below its stop.

    Args:
        start: the first place.
        stop: the place after the last.
        passed: bit n is 1 if the place `start + n` has been passed.
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
    """Return the number of zeros below the lowest bit that is 1."""
    lowest_one = bits & -bits
    return lowest_one.bit_length() - 1


class Rest:
    """The samples that are left of an epoch, numbered from 0: stretches, one after another.

    Args:
        stretches: the stretches; empty ones are left out.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = [stretch for stretch in stretches if stretch[1] < stretch[2]]
        # Number of samples up to the end of each stretch.
        self._ends = list(accumulate(stop - start for _, start, stop in self._stretches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield the stretches from number `start` to `stop` of the rest, cut to these."""
        while start < stop:
            at = bisect_right(self._ends, start)
            reader, _, stretch_stop = self._stretches[at]
            end = min(stop, self._ends[at])
            # Added to a number in the rest, this gives the number in the reader's span.
            to_span = stretch_stop - self._ends[at]
            yield reader, start + to_span, end + to_span
            start = end
