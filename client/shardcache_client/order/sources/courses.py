"""Parts of sources in a mixture's epochs, where a change in mid-epoch has left some. Pure.

Each source is an endless sequence of samples, of which an epoch takes the next ones. Ranks read
spans of the epoch, and mix the samples of several shards in each. So what is left of an epoch in
its middle is not a stretch of a source's sequence: it is the ends of mixes, one for each rank.

If the mixture changes there, each source goes on along its course. First come the samples that the
epoch has left of it, in the order of the ranks that would have read them; then its sequence, from
where that epoch would have ended. The number of a sample in a course is the number of samples of
the source that are taken before it. So after the samples that were left, it is the position in the
sequence. The course of a source that has never been in such an epoch is its sequence.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from shardcache_client.order.sequences.partition import Phase, rest_after
from shardcache_client.order.sequences.turns import Proportions, Rotated, Turns, Widened

Grouping = Literal["mixed", "source", "rank-source"]
"""Batches of several sources, or of one: the same on all ranks at each step, or each rank's own."""


@dataclass(frozen=True, slots=True)
class MixPart:
    """The places `low` to `high` of a mix.

    A mix is the samples `begin` to `end`, in the mixed order in which one reader reads them. They
    are samples of a source's sequence or course, or places of an epoch of all sources.

    Attributes:
        begin: first of the samples that are mixed.
        end: one after the last of them.
        low: first place, counted from the beginning of the mix.
        high: one after the last place.
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
        left: parts of the source's sequence that earlier epochs have left.
        resumes: number of the first sample after these, which is its position in the sequence.
    """

    left: tuple[MixPart, ...] = ()
    resumes: int = 0

    @property
    def start(self) -> int:
        """Number of the first sample that is left."""
        return self.resumes - len(self._left_parts)

    @cached_property
    def _left_parts(self) -> _Parts:
        return _Parts(self.left)

    def between(self, start: int, stop: int) -> list[MixPart]:
        """Return the parts of the sequence from one sample to a later one."""
        parts = list(self._left_parts.between(start - self.start, stop - self.start))
        first_after = max(start, self.resumes)
        if first_after < stop:
            parts.append(MixPart.whole(first_after, stop))
        return parts

    def after(self, stop: int, left: Iterable[MixPart]) -> "Course":
        """Return the course after an epoch that has left parts of this one.

        Args:
            stop: number of the sample before which the epoch would have ended.
            left: parts that the epoch has left, whose samples are numbered by this course.
        """
        parts: list[MixPart] = []
        for part in left:
            # The samples that were mixed may be parts of earlier mixes themselves.
            mixed = _Parts(self.between(part.begin, part.end))
            parts += mixed.between(part.low, part.high)
        # Left by earlier epochs, and not to be read in this one either.
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
        """Return the samples of each source in a part of the epoch, as parts of their courses."""
        mixed = self.ranges(span.begin, span.end)
        left = self.ranges(span.begin + span.low, span.begin + span.high)
        return [
            MixPart(begin, end, start - begin, stop - begin)
            for (begin, end), (start, stop) in zip(mixed, left, strict=True)
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
        step_samples = self.spans * self.size
        if drop:
            return samples // step_samples
        return -(-samples // step_samples)

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
        # These are the turns of one span. Beyond its end they repeat, for the spans after it.
        return MixtureLayout(starts, Widened(turns, form.size), places)
    # Each span has as many turns as the epoch has steps.
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
        if self.drop:
            return samples // self.size
        return -(-samples // self.size)


def left_by_ranks(places: int, phases: Sequence[Phase]) -> list[MixPart]:
    """Return the parts of an epoch that are left after phases of ranks."""
    first_cut = phases[0].cut
    rest = rest_after(places, phases, first_cut)
    parts = []
    for reader, low, high in rest.between(0, len(rest)):
        begin, end = first_cut.owned_span(places, reader)
        parts.append(MixPart(begin, end, low, high))
    return parts


def left_by_batches(places: int, taken: int, form: GlobalBatches) -> list[MixPart]:
    """Return the parts of an epoch that are left after `taken` global batches."""
    # Each batch takes a piece of each span. If the epoch is padded to whole batches, the last spans
    # may end after it.
    piece = form.size // form.spans
    length = form.batches(places) * piece
    passed = min(taken * piece, length)
    parts = []
    for span in range(form.spans):
        begin = span * length
        parts.append(MixPart(begin, begin + length, passed, min(length, places - begin)))

    # A last batch that is dropped belongs to no span.
    covered = form.spans * length
    if covered < places:
        parts.append(MixPart.whole(covered, places))
    return [part for part in parts if part.low < part.high]
