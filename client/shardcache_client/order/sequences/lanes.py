"""The samples that one reader reads, in order: windows of shards, mixed, and lanes. Pure.

A piece is what the reader reads of one shard; a place is the number of a sample in the order.

A `Mix` counts time in steps. One piece enters per step, in the order of the pieces, and spreads its
samples in equal parts over `window` steps, beginning with its own; the samples of a step come in
random order. So the first sample needs only the first shard, it is known in advance when each shard
is needed, a reader never holds more than `window` shards, and no sample waits in a buffer.
Neighbours in a shard end up a third of a window's samples apart on average, in either order. Any
step can be computed from the sizes of the pieces in it, so reading can start anywhere without
delay.

(MosaicML's py1e shifts each sample by a random distance and sorts; steps are the same idea with
parts of equal size, so that no step depends on the random numbers of the others.)

Lanes are the samples of several sources, or of several spans, read as one sequence. The turns alone
determine to which lane each place of the sequence belongs, so any part can be found without what
comes before, and the order in which the shards of all lanes are needed is known in advance, too.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self, TypeAlias

from shardcache_client.order.sequences.rounds import Pieces, permutation
from shardcache_client.order.sequences.turns import Turns


@dataclass(frozen=True)
class Mix:
    """A mixed order of pieces.

    Attributes:
        pieces: in the order in which they enter.
        window: number of steps in which each of them takes part. 1 permutes the samples of each
            piece alone, and 0 leaves them in file order.
    """

    pieces: Pieces
    window: int = 0

    @property
    def _steps_of_piece(self) -> int:
        return max(1, self.window)

    @property
    def steps(self) -> int:
        """Number of steps until the last piece has left."""
        if not self.pieces:
            return 0
        return len(self.pieces) + self._steps_of_piece - 1

    def pieces_at(self, step: int) -> range:
        """Return the pieces that are in a step."""
        return range(max(0, step - self._steps_of_piece + 1), min(step + 1, len(self.pieces)))

    def part(self, piece: int, step: int, numbers: Sequence[int]) -> Sequence[int]:
        """Return the samples of a piece that come in a step, in order.

        Args:
            piece: its number.
            step: number of the step.
            numbers: those of all of the piece's samples.
        """
        start, stop = self._part_range(len(numbers), step - piece)
        return numbers[start:stop]

    def interleaved(self, step: int, sizes: Sequence[int]) -> list[int]:
        """Return the piece of each sample of a step, as an index into `pieces_at(step)`.

        Args:
            step: number of the step.
            sizes: number of samples that each of these pieces gives to it.
        """
        by_piece = [nth for nth, size in enumerate(sizes) for _ in range(size)]
        if len(sizes) <= 1:
            return by_piece
        # The random order of a step is that of the piece which enters in it. Steps after the last
        # piece has entered are numbered. The first of them has number 0, and so the key of the step
        # before it, which saved states rely on.
        entering = self.pieces[min(step, len(self.pieces) - 1)]
        beyond = max(0, step - len(self.pieces))
        key = f"{entering.order_key}:{entering.start}+{beyond}"
        return [by_piece[drawn] for drawn in permutation(len(by_piece), key)]

    def _part_range(self, size: int, nth: int) -> tuple[int, int]:
        """Return the range of a piece's samples for the nth of its steps."""
        # Rounded up, so that the first part has the most.
        start = -(-size * nth // self._steps_of_piece)
        stop = -(-size * (nth + 1) // self._steps_of_piece)
        return start, stop

    # For pieces whose sizes are known

    def __len__(self) -> int:
        return self.pieces.before(len(self.pieces))

    def between(self, start: int, stop: int) -> "Segment":
        """Return the part from one place of the order to a later one."""
        first = self.find(start) if start else (0, 0)
        if stop == len(self):
            return Segment(self, first, last=None, span=(start, stop))
        step, nth = self.find(stop - 1)
        return Segment(self, first, last=(step, nth + 1), span=(start, stop))

    def find(self, place: int) -> tuple[int, int]:
        """Return the step that contains a place of the whole order, and the place's index in it."""
        # Without mixing, the place would be in the piece `entry`. With it, the place is in one of
        # that piece's steps:
        # 1. Before the first of them, only samples of earlier pieces have come: at most `place`.
        # 2. By the end of the last, all samples of earlier pieces have come, and all of the piece:
        #    more than `place`.
        entry = self.pieces.holding(place)
        steps = range(min(self._steps_of_piece, self.steps - entry))
        nth_step = bisect_right(steps, place, key=lambda nth: self._samples_through(entry + nth))
        step = entry + nth_step
        return step, place - self._samples_before(step)

    def enters(self, piece: int) -> int:
        """Return the first place at which a piece is held."""
        return self._samples_before(piece)

    def leaves(self, piece: int) -> int:
        """Return the first place at which a piece is no longer held."""
        return self._samples_before(min(piece + self._steps_of_piece, self.steps))

    def _samples_before(self, step: int) -> int:
        return self._samples_through(step - 1) if step else 0

    def _samples_through(self, step: int) -> int:
        """Return the number of samples up to the end of a step."""
        # All samples of the pieces that have left, and some of each that is in the step.
        pieces = self.pieces_at(step)
        starts = [self.pieces.before(piece) for piece in range(pieces.start, pieces.stop + 1)]
        samples = starts[0]
        for piece, (start, stop) in zip(pieces, pairwise(starts), strict=True):
            _, samples_of_piece = self._part_range(stop - start, step - piece)
            samples += samples_of_piece
        return samples


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a mix's order, which may begin and end within steps.

    Attributes:
        mix: the whole order.
        first: step in which reading begins, and number of that step's samples to skip.
        last: step in which it ends, and number of its samples to read; None to read to the end.
        span: the same range as places of the mix's order, if samples are counted.
    """

    mix: Mix
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] | None = None
    span: tuple[int, int] = (0, 0)

    @property
    def samples(self) -> int:
        """Number of samples, if they are counted."""
        return self.span[1] - self.span[0]

    @property
    def mixed(self) -> bool:
        """True if the samples of several shards are mixed, or those of one permuted."""
        return self.mix.window > 0

    def between(self, start: int, stop: int) -> "Segment":
        """Return the part from one of these places, counted from 0, to a later one.

        Samples must be counted.
        """
        return self.mix.between(self.span[0] + start, self.span[0] + stop)

    @property
    def pieces(self) -> range:
        """Pieces that samples come from, in the order in which they enter."""
        begin, _ = self.first
        end = self.mix.steps - 1
        if self.last is not None:
            end, _ = self.last
        if begin > end:
            return range(0)
        return range(self.mix.pieces_at(begin).start, self.mix.pieces_at(end).stop)


@dataclass(frozen=True, slots=True)
class Slice(ABC):
    """The places `start` to `stop` of a sequence that is made of other lanes, or parts of them."""

    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    def between(self, start: int, stop: int) -> Self:
        """Return the part from one of these places, counted from 0, to a later one."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    @property
    @abstractmethod
    def mixed(self) -> bool:
        """True if samples of several shards are mixed, or those of one permuted."""


Lane: TypeAlias = Mix | Slice
"""A sequence of samples of which any part can be read."""

Part: TypeAlias = Segment | Slice
"""A part of a lane: a mix is cut into segments, any other lane into slices of its own class."""


@dataclass(frozen=True, slots=True)
class Interleaved(Slice):
    """Places of lanes that take turns.

    Attributes:
        turns: the lane of each place.
        lanes: the samples of each lane from `origin` on.
        origin: place of `turns` at which the lanes begin.
        names: of each lane, given to its samples; empty for none.
    """

    turns: Turns
    lanes: tuple[Lane, ...]
    origin: int = 0
    names: tuple[str, ...] = ()

    @property
    def mixed(self) -> bool:
        """True if some lane mixes the samples of several shards."""
        return any(part.mixed for part in self.parts().values())

    def parts(self) -> dict[int, Part]:
        """Return the part of each lane that has any, by the lane's number."""
        spans = zip(self.lanes, self._spans(), strict=True)
        parts = {}
        for number, (lane, (start, stop)) in enumerate(spans):
            if start < stop:
                parts[number] = lane.between(start, stop)
        return parts

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each lane's part of these places, as places of the lane."""
        before_origin = self.turns.before(self.origin)
        before_start = self.turns.before(self.start)
        before_stop = self.turns.before(self.stop)
        for origin, start, stop in zip(before_origin, before_start, before_stop, strict=True):
            yield start - origin, stop - origin


@dataclass(frozen=True, slots=True)
class Chained(Slice):
    """Places of parts that follow each other."""

    segments: "tuple[Part, ...]"

    @property
    def mixed(self) -> bool:
        """True if some part mixes the samples of several shards, or permutes those of one."""
        return any(segment.mixed for segment in self.segments)

    def parts(self) -> "list[Part]":
        """Return the parts that have some of these places, each cut to them."""
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

    They come in rows: `width` places from `first` on, and as many again after each `period`. To
    read them, a reader passes all places of the lane from the first to the last: those of
    `passing`.

    Attributes:
        lane: the sequence that has them.
        first: place of the lane.
        width: number of places in a row.
        period: distance, in places, from the beginning of a row to that of the next.
    """

    lane: Lane
    first: int
    width: int
    period: int

    @property
    def mixed(self) -> bool:
        """True: samples are read by number, from whole shards."""
        return True

    def _place_in_lane(self, number: int) -> int:
        """Return the lane's place for the place `number` of all rows, counted from `first` on."""
        row, nth = divmod(number, self.width)
        return self.first + row * self.period + nth

    def passed_before(self, number: int) -> int:
        """Return the number of places of `passing` before one of these, counted from 0."""
        return self._place_in_lane(self.start + number) - self._place_in_lane(self.start)

    def reached_by(self, passed: int) -> int:
        """Return the number of these places before the place `passed` of `passing`."""
        since_first = self._place_in_lane(self.start) + passed - self.first
        row, nth = divmod(max(0, since_first), self.period)
        return row * self.width + min(nth, self.width) - self.start

    def passing(self) -> Part:
        """Return all samples of the lane from the first of these to the last."""
        start = self._place_in_lane(self.start)
        last = self._place_in_lane(self.stop - 1)
        return self.lane.between(start, last + 1)


@dataclass(frozen=True, slots=True)
class Share:
    """One reader's share of an epoch: parts one after another.

    Attributes:
        segments: the parts.
        samples: number of samples in all of them; None if they are not counted.
    """

    segments: tuple[Part, ...]
    samples: int | None
