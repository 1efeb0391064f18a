"""The order in which a mixture takes each source's samples after changes in mid-epoch. Pure.

`mixture` asks for the samples of an epoch, and `changes` for those that an epoch has left.

- A source's sequence is its endless order of samples, one round of its shards after another.
- A place is the number of a sample in an epoch of all sources. A span is the consecutive places
  that one rank reads.
- A mix is some samples in the order in which one reader reads them: several shards alternate. Its
  places are counted from its own beginning. A mix part is a range of these places.
- A course is the order in which the mixture takes a source's samples. It is the source's sequence,
  unless the mixture changed before an epoch was read to its end.

Suppose that two ranks read an epoch of 12 places, 8 for source A and 4 for source B, which come in
the order A B A A B A A B A A B A. Rank 0 has the span of the places 0 to 5, rank 1 the span of 6 to
11. Rank 0 mixes the samples 0 to 3 of A and 0 and 1 of B; rank 1 mixes 4 to 7 of A and 2 and 3 of
B.
Now the mixture changes after two places of each rank: each has read one sample of A and one of B.

    left of rank 0's mixes   places 1 to 3 of A's samples 0 to 3, place 1 of B's samples 0 and 1
    left of rank 1's mixes   places 1 to 3 of A's samples 4 to 7, place 1 of B's samples 2 and 3

Since each rank reads in mixed order, the samples of A that are left are not a stretch of its
sequence. They are the ends of two mixes: the places 1 to 3 of the mix of samples 0 to 3, which is
`MixPart(0, 4, low=1, high=4)`, and those of the mix of samples 4 to 7. The course of A goes on with
these 6 samples, in the order of the ranks, and then with its sequence from sample 8 on, where the
epoch would have ended.

The number of a sample in a course is the number of the source's samples that are taken before it.
So A's course goes on at number 2, has the left samples as numbers 2 to 7, and resumes the sequence
at number 8. From there on, a sample's number is again its position in the sequence.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from shardcache_client.order.sequences.partition import Phase, rest_after


@dataclass(frozen=True, slots=True)
class MixPart:
    """The places of a mix from `low` up to, but not including, `high`.

    A mix has the samples from `begin` up to, but not including, `end`, in the order in which one
    reader reads them. `begin` and `end` are numbers in a source's sequence or course, or places of
    an epoch of all sources.

    `MixPart(4, 8, low=1, high=4)` is the last three samples that a reader yields when it mixes the
    samples 4 to 7.

    Attributes:
        begin: number of the first of the samples that are mixed.
        end: number after the last of the samples that are mixed.
        low: first place of the part, counted from the beginning of the mix.
        high: place after the last of the part.
    """

    begin: int
    end: int
    low: int
    high: int

    @classmethod
    def whole(cls, begin: int, end: int) -> "MixPart":
        """Return all of the mix of the samples from `begin` to `end`."""
        return cls(begin, end, 0, end - begin)

    @property
    def samples(self) -> int:
        """Number of samples in the part."""
        return self.high - self.low

    def between(self, start: int, stop: int) -> "MixPart":
        """Return the part from one place of this part, counted from 0, to a later place."""
        return replace(self, low=self.low + start, high=self.low + stop)


class _Parts:
    """Parts of mixes, one after another, whose samples are numbered from 0 through all parts."""

    def __init__(self, parts: Sequence[MixPart]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.samples for part in parts))

    def __len__(self) -> int:
        """Return the number of samples in all parts together."""
        return self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[MixPart]:
        """Yield the parts of the samples from number `start` to `stop`, cut to these."""
        for at in range(bisect_right(self._ends, start), len(self._parts)):
            part = self._parts[at]
            begin = self._ends[at] - part.samples
            if begin >= stop:
                return
            yield part.between(max(start - begin, 0), min(stop - begin, part.samples))


@dataclass(frozen=True)
class Course:
    """The samples of a source in the order in which a mixture takes them.

    In the example of the module's docstring, the course of A has the two parts as `left`, `resumes`
    at 8 and has the `start` 2. Its samples 2 to 9 are these parts, then samples 8 and 9 of the
    sequence.

    Attributes:
        left: parts of the source's sequence that epochs have left unread.
        resumes: number of the first sample after `left`. From there on, numbers in the course are
            positions in the sequence.
    """

    left: tuple[MixPart, ...] = ()
    resumes: int = 0

    @property
    def start(self) -> int:
        """Number of the course's first sample: the first of `left`, or `resumes` if it is empty."""
        return self.resumes - len(self._left_parts)

    @cached_property
    def _left_parts(self) -> _Parts:
        """The parts in `left`, with their samples numbered through."""
        return _Parts(self.left)

    def between(self, start: int, stop: int) -> list[MixPart]:
        """Return the samples of the course from number `start` to `stop`, as parts of mixes.

        The samples of these mixes are numbered by the sequence.
        """
        parts = list(self._left_parts.between(start - self.start, stop - self.start))
        first_after = max(start, self.resumes)
        if first_after < stop:
            parts.append(MixPart.whole(first_after, stop))
        return parts

    def after(self, stop: int, left: Iterable[MixPart]) -> "Course":
        """Return the course after an epoch that has left parts of this one.

        Args:
            stop: number in this course at which the epoch would have ended.
            left: parts that the epoch has left unread. Their samples are numbered by this course.
        """
        parts: list[MixPart] = []
        for part in left:
            # The samples of a mix may come from parts that an earlier epoch had left. `mixed`
            # numbers them from the mix's beginning, as `low` and `high` do.
            mixed = _Parts(self.between(part.begin, part.end))
            parts += mixed.between(part.low, part.high)
        # Samples from `stop` on were left by earlier epochs and did not belong to this epoch.
        # There are none if `stop` lies beyond them.
        parts += self.between(stop, self.resumes)
        return Course(tuple(parts), max(stop, self.resumes))


class GlobalBatches(NamedTuple):
    """The form of global batches, of which each rank has an equal part: see `ElasticDeal`.

    Attributes:
        size: number of samples in a batch of all ranks together.
        spans: number of spans of an epoch; a batch takes the next samples of each span.
        drop: True if the last batch of an epoch is dropped unless it is whole.
    """

    size: int
    spans: int
    drop: bool

    def batches(self, samples: int) -> int:
        """Return the number of batches in an epoch of `samples`."""
        if self.drop:
            return samples // self.size
        return -(-samples // self.size)


def left_by_ranks(places: int, phases: Sequence[Phase]) -> list[MixPart]:
    """Return the parts of an epoch that ranks have left unread, one or more for each rank's span.

    With 12 places, two ranks and 2 places taken by each, they are the places 2 to 5 of the spans
    0 to 5 and 6 to 11.

    Args:
        places: number of places of the epoch.
        phases: divisions of the epoch and how far each rank came, in order; at least one.
    """
    first_partition = phases[0].partition
    rest = rest_after(places, phases, first_partition)
    parts = []
    for reader, low, high in rest.between(0, len(rest)):
        begin, end = first_partition.owned_span(places, reader)
        parts.append(MixPart(begin, end, low, high))
    return parts


def left_by_batches(places: int, taken: int, form: GlobalBatches) -> list[MixPart]:
    """Return the parts of an epoch that are left unread after `taken` global batches.

    Args:
        places: number of places of the epoch.
        taken: number of global batches.
        form: form of the global batches.
    """
    # Each batch takes `piece` places of each span. If the epoch is padded to whole batches, the
    # last spans may reach beyond the end of the epoch.
    piece = form.size // form.spans
    length = form.batches(places) * piece
    passed = min(taken * piece, length)
    parts = []
    for span in range(form.spans):
        begin = span * length
        parts.append(MixPart(begin, begin + length, passed, min(length, places - begin)))

    # The samples of a last batch that is dropped belong to no span.
    covered = form.spans * length
    if covered < places:
        parts.append(MixPart.whole(covered, places))
    return [part for part in parts if part.low < part.high]
