"""Parts of sources in a mixture's epochs, where a change in mid-epoch has left some. Pure.

Each source is an endless sequence of samples, of which an epoch takes the next ones. Ranks read
spans of the epoch, and mix the samples of several shards in each. So what is left of an epoch in
its middle is not a stretch of a source's sequence: it is the ends of mixes, one for each rank.

If the mixture changes there, the sources go on along their courses. The course of a source is what
the epoch has left of it, in the order of the ranks that would have read it, and then the sequence,
from where that epoch would have ended. Samples of a course are numbered by how many of the source
have been taken before: after all that was left, the number is the position in the sequence. The
course of a source that has never been in such an epoch is its sequence.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from shardcache_client.order.sequences.partition import Phase, what_is_left
from shardcache_client.order.sequences.turns import Proportions, Rotated, Turns, Widened

Grouping = Literal["mixed", "source", "rank-source"]
"""Batches of several sources, or of one: the same on all ranks at each step, or each rank's own."""


@dataclass(frozen=True, slots=True)
class MixPart:
    """A part of one mix, which is what one reader reads of an epoch.

    Attributes:
        begin: first of the samples that are mixed.
        end: one after the last of them.
        low: first place of the part, counted from the beginning of the mix.
        high: one after its last place.
    """

    begin: int
    end: int
    low: int
    high: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.high - self.low

    def between(self, start: int, stop: int) -> "MixPart":
        """Return the part from one of these places, counted from 0, to a later one."""
        return replace(self, low=self.low + start, high=self.low + stop)


class _Parts:
    """Parts of mixes, one after another."""

    def __init__(self, parts: Sequence[MixPart]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.samples for part in parts))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[MixPart]:
        """Yield the parts from one place to a later one."""
        for number in range(bisect_right(self._ends, start), len(self._parts)):
            part = self._parts[number]
            begin = self._ends[number] - part.samples
            if begin >= stop:
                return
            yield part.between(max(start - begin, 0), min(stop - begin, part.samples))


@dataclass(frozen=True)
class Course:
    """The samples of a source in the order in which a mixture takes them.

    Attributes:
        left: what earlier epochs have left of the source's sequence.
        resumes: number of the first sample after these, which is its position in the sequence.
    """

    left: tuple[MixPart, ...] = ()
    resumes: int = 0

    @property
    def start(self) -> int:
        """Number of the first sample that is left."""
        return self.resumes - len(self._left)

    @cached_property
    def _left(self) -> _Parts:
        return _Parts(self.left)

    def between(self, start: int, stop: int) -> list[MixPart]:
        """Return the parts of the sequence from one sample to a later one."""
        found = list(self._left.between(start - self.start, stop - self.start))
        first_after = max(start, self.resumes)
        if first_after < stop:
            found.append(MixPart(first_after, stop, 0, stop - first_after))
        return found

    def after(self, stop: int, left: Iterable[MixPart]) -> "Course":
        """Return the course after an epoch that has left parts of this one.

        Args:
            stop: number of the sample before which the epoch would have ended.
            left: runs of samples of this course, and what is left of each.
        """
        parts: list[MixPart] = []
        for each in left:
            mixed = _Parts(self.between(each.begin, each.end))
            parts += mixed.between(each.low, each.high)
        # The epoch would not have taken these, which earlier epochs had left.
        parts += self.between(stop, self.resumes)
        return Course(tuple(parts), max(stop, self.resumes))


@dataclass(frozen=True, slots=True)
class MixtureLayout:
    """An epoch of a mixture.

    Attributes:
        starts: where it begins in each source's course.
        turns: the source of each place.
        places: number of places, each for a sample.
    """

    starts: tuple[int, ...]
    turns: Turns
    places: int

    @property
    def samples(self) -> tuple[int, ...]:
        """Number of samples of each source."""
        if not self.places:
            return (0,) * len(self.starts)
        return tuple(self.turns.before(self.places))

    def ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return start and stop of the samples of each source at the places from one to another."""
        spans = zip(self.starts, self.turns.before(begin), self.turns.before(end), strict=True)
        return [(start + first, start + last) for start, first, last in spans]

    def parts(self, span: MixPart) -> list[MixPart]:
        """Return the part of each source's course that has the places of a part of the epoch."""
        wholes = self.ranges(span.begin, span.end)
        parts = self.ranges(span.begin + span.low, span.begin + span.high)
        return [
            MixPart(begin, end, start - begin, stop - begin)
            for (begin, end), (start, stop) in zip(wholes, parts, strict=True)
        ]


class SourceBatches(NamedTuple):
    """The form of batches of one source each.

    Attributes:
        spans: number of spans of an epoch; a step takes the next places of each.
        size: number of places that a step takes of a span.
        alike: True if all spans take the same source at a step.
    """

    spans: int
    size: int
    alike: bool

    def steps(self, samples: int, *, drop: bool) -> int:
        """Return the number of steps in an epoch of `samples`.

        A last one that is not whole counts, unless it is dropped.
        """
        step = self.spans * self.size
        return samples // step if drop else -(-samples // step)

    @property
    def samples_per_turn(self) -> int:
        """Number of samples that a source gives in a turn."""
        return self.size * self.spans if self.alike else self.size


def layout_of(
    starts: tuple[int, ...], samples: tuple[int, ...], form: SourceBatches | None
) -> MixtureLayout:
    """Return the layout of an epoch.

    Args:
        starts: where it begins in each source's course.
        samples: number of samples that it takes of each source.
        form: of its batches; None if they are mixed.
    """
    places = sum(samples)
    if form is None:
        return MixtureLayout(starts, Proportions(samples), places)
    turns = Proportions(tuple(each // form.samples_per_turn for each in samples))
    if form.alike:
        # After the last turn they begin again, so that each span has all turns.
        return MixtureLayout(starts, Widened(turns, form.size), places)
    steps = places // (form.spans * form.size)
    return MixtureLayout(starts, Widened(Rotated(turns, steps), form.size), places)


class GlobalBatches(NamedTuple):
    """The form of batches that all ranks share: see `ElasticDeal`.

    Attributes:
        size: number of samples in a batch of all ranks.
        spans: number of spans of an epoch; a batch takes the next samples of each.
        drop: True if a last batch that is not whole is dropped.
    """

    size: int
    spans: int
    drop: bool

    def batches(self, samples: int) -> int:
        """Return the number of batches in an epoch of `samples`."""
        return samples // self.size if self.drop else -(-samples // self.size)


def left_by_ranks(places: int, phases: Sequence[Phase]) -> list[MixPart]:
    """Return what some phases of ranks have left of an epoch."""
    owners = phases[0].cut
    rest = what_is_left(places, phases, owners)
    found = []
    for owner, low, high in rest.between(0, len(rest)):
        begin, end = owners.own(places, owner)
        found.append(MixPart(begin, end, low, high))
    return found


def left_by_batches(places: int, taken: int, form: GlobalBatches) -> list[MixPart]:
    """Return what is left of an epoch after `taken` global batches."""
    # Each batch takes a piece of each span. If the epoch is padded to whole batches, the last spans
    # may end after it.
    piece = form.size // form.spans
    length = form.batches(places) * piece
    passed = min(taken * piece, length)
    found = []
    for span in range(form.spans):
        begin = span * length
        found.append(MixPart(begin, begin + length, passed, min(length, places - begin)))

    # A last batch that is dropped belongs to no span.
    covered = form.spans * length
    if covered < places:
        found.append(MixPart(covered, places, 0, places - covered))
    return [part for part in found if part.low < part.high]
