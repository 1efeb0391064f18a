"""Lanes: the samples that one reader reads, in order, of one dataset or of several. Pure.

`dealing` and `mixture` build these sequences, and `rank_epoch` turns them into samples.

- A place is the number of a sample in such a sequence, from 0.
- A lane is any sequence that can be read from any place: a mix (see `mixes`), or a sequence made of
  other lanes.
- A part is a range of a lane's places, and can itself be read from any place.
- A share is everything that one reader reads of an epoch: parts of lanes.

Lanes that take turns are the samples of several sources, or of several spans of an epoch, read as
one sequence. The turns alone determine to which lane each place of the sequence belongs. With turns
of two lanes that have 6 and 3 samples:

    place              0  1  2  3  4  5  6  7  8
    lane               0  1  0  0  1  0  0  1  0
    place in the lane  0  0  1  2  1  3  4  2  5

So places 4 to 8 have the samples 3, 4 and 5 of lane 0, and 1 and 2 of lane 1. Any part of the
sequence can be found like this, without the places before it, and the order in which the shards of
all lanes are needed is known in advance.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self, TypeAlias

from shardcache_client.order.sequences.lane_turns import Turns
from shardcache_client.order.sequences.mixes import Mix, Segment


@dataclass(frozen=True, slots=True)
class Slice(ABC):
    """The places `start` to `stop` of a sequence that is made of other lanes or their parts.

    Attributes:
        start: the first place of the sequence.
        stop: the place after the last.
    """

    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    def between(self, start: int, stop: int) -> Self:
        """Return the part from one place of this slice, counted from 0, to a later place."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    @property
    @abstractmethod
    def is_mixed(self) -> bool:
        """True if the samples of several shards are mixed, or each shard's samples are permuted."""


Lane: TypeAlias = Mix | Slice
"""A sequence of samples that can be read from any place to any other."""

Part: TypeAlias = Segment | Slice
"""A part of a lane: a `Segment` of a mix, or of any other lane a smaller `Slice` of its class."""


@dataclass(frozen=True, slots=True)
class Interleaved(Slice):
    """Places of lanes that take turns.

    `start` and `stop` are places of `turns`. The lanes begin at the place `origin` of the turns,
    which need not be 0: those of the reader of an epoch's second half begin in the middle.

    Attributes:
        turns: the lane of each place.
        lanes: the samples of each lane from the place `origin` on.
        origin: place of `turns` at which every lane has its first sample.
        names: a name for each lane, which its samples get; empty if they get none.
    """

    turns: Turns
    lanes: tuple[Lane, ...]
    origin: int = 0
    names: tuple[str, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """True if some lane mixes the samples of several shards, or permutes each shard's."""
        return any(part.is_mixed for part in self.parts().values())

    def parts(self) -> dict[int, Part]:
        """Return each lane's part of these places, by the lane's number, unless it is empty."""
        spans = zip(self.lanes, self._spans(), strict=True)
        parts = {}
        for number, (lane, (start, stop)) in enumerate(spans):
            if start < stop:
                parts[number] = lane.between(start, stop)
        return parts

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each lane's part of these places, as places of the lane."""
        # Each of these has a number for each lane: how many of its places come before.
        before_origin = self.turns.before(self.origin)
        before_start = self.turns.before(self.start)
        before_stop = self.turns.before(self.stop)
        for origin, start, stop in zip(before_origin, before_start, before_stop, strict=True):
            yield start - origin, stop - origin


@dataclass(frozen=True, slots=True)
class Chained(Slice):
    """Places of parts that follow each other.

    Attributes:
        segments: the parts. `start` and `stop` are places of all of them together.
    """

    segments: tuple[Part, ...]

    @property
    def is_mixed(self) -> bool:
        """True if some part mixes the samples of several shards, or permutes each shard's."""
        return any(segment.is_mixed for segment in self.segments)

    def parts(self) -> list[Part]:
        """Return the parts between `start` and `stop`; the first and the last may be cut."""
        ends = list(accumulate(segment.samples for segment in self.segments))
        parts = []
        for segment, end in zip(self.segments, ends, strict=True):
            begin = end - segment.samples
            first = max(self.start, begin)
            last = min(self.stop, end)
            if first < last:
                parts.append(segment.between(first - begin, last - begin))
        return parts


@dataclass(frozen=True, slots=True)
class Strided(Slice):
    """Places of a lane at regular distances.

    These places come in rows: `width` places from `first` on, and as many again after each
    `period`. With `first` 2, `width` 2 and `period` 6, they are the places 2, 3, 8, 9, 14, 15 and
    so on of the lane. The slice numbers them from 0: its `start` 0 and `stop` 4 mean 2, 3, 8 and 9.

    A reader needs the shards of a mix in the order of the lane. So it goes over all places of the
    lane from the first to the last, here 2 to 9, although it yields only the four. This part of the
    lane, with its gaps, is `passing`.

    Attributes:
        lane: the sequence of which some places are taken.
        first: place of the lane at which the first row begins.
        width: number of places in a row.
        period: distance, in places of the lane, from the beginning of a row to that of the next.
    """

    lane: Lane
    first: int
    width: int
    period: int

    @property
    def is_mixed(self) -> bool:
        """True, also for a lane in file order: the gaps between the rows leave samples out."""
        return True

    def _place_in_lane(self, number: int) -> int:
        """Return the lane's place for place `number` of the rows, counted from the first row on."""
        row, nth = divmod(number, self.width)
        return self.first + row * self.period + nth

    def passed_before(self, number: int) -> int:
        """Return the number of places of `passing` before place `number` of this slice.

        In the example of the class, it is 6 for place 2 of the slice, which is place 8 of the lane.
        """
        return self._place_in_lane(self.start + number) - self._place_in_lane(self.start)

    def reached_by(self, passed: int) -> int:
        """Return the number of places of this slice before place `passed` of `passing`.

        This is the inverse of `passed_before`. In the example of the class, `passing` has 8 places,
        of which 0, 1, 6 and 7 are the slice's. So the result is 2 for each `passed` from 2 to 6.
        """
        since_first_row = self._place_in_lane(self.start) + passed - self.first
        row, nth = divmod(since_first_row, self.period)
        # A place in the gap after a row comes after all `width` places of the row.
        return row * self.width + min(nth, self.width) - self.start

    def passing(self) -> Part:
        """Return all samples of the lane from the first place of this slice to the last."""
        start = self._place_in_lane(self.start)
        last = self._place_in_lane(self.stop - 1)
        return self.lane.between(start, last + 1)


@dataclass(frozen=True, slots=True)
class Share:
    """One reader's share of an epoch: parts of lanes, read one after another.

    Attributes:
        segments: the parts.
        samples: number of samples in all parts together.
    """

    segments: tuple[Part, ...]
    samples: int
