"""The samples that one reader reads, in order: windows of shards, mixed, and lanes of them that take turns. Pure.

A `Mix` counts time in steps. One piece enters per step, in the order of the pieces, and spreads its samples in equal
parts over `window` steps, beginning with its own; the samples of a step come in random order. So the first sample needs
only the first shard, it is known in advance when each shard is needed, a reader never holds more than `window` shards,
and no sample waits in a buffer. Neighbours in a shard end up a third of a window's samples apart on average, in either
order. Any step can be computed from the sizes of the pieces in it, so reading can start anywhere without delay.

(MosaicML's py1e shifts each sample by a random distance and sorts; steps are the same idea with parts of equal size, so
that no step depends on the random numbers of the others.)

Lanes are the samples of several sources, or of several spans, read as one sequence. The turns alone determine which
lane has a place of it, so any part can be found without what comes before, and the order in which the shards of all
lanes are needed is known in advance, too.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Self, TypeAlias

from shardcache_client.order.rounds import Pieces, permutation


@dataclass(frozen=True, slots=True)
class _Split:
    """A sequence of `samples` places, of which the first group has `share`, at least 1, and the second has the rest."""

    first: "_Split | int"
    second: "_Split | int"
    share: int
    samples: int

    def before(self, place: int) -> int:
        """Return the number of the first group's places before a place."""
        return (2 * self.share * place + self.samples) // (2 * self.samples)

    def place(self, number: int, *, of_first: bool) -> int:
        """Return the place of the turn of this number of the first group, or of the second."""
        if of_first:
            return -((2 * number + 1) * self.samples // (-2 * self.share)) - 1
        return (2 * number + 1) * self.samples // (2 * (self.samples - self.share))


@dataclass(frozen=True)
class Proportions:
    """Turns of lanes with given numbers of samples, spread evenly: of the first x of N places, a lane has n·x/N, ± 2.

    Two lanes split a sequence of N places as a line is drawn on a grid: of the first x places, the first lane has
    n·x/N, rounded. More lanes split it in two groups, whose places are split in turn, and so on: a binary tree, cut so
    that both sides are as equal as possible. Everything about a place is found by going down the tree, without the
    places before it.

    Rounding moves a lane by at most half a place at each split, and each further split scales down the error of those
    above it. The heavier side of a split is a single lane or has at most two thirds of the places (if the heaviest lane
    has less than a third, a cut lies within a sixth of the middle; if it has a third to a half, the cut behind it
    leaves less than two thirds; if more, the rest is less than half). So a group's error is below 1/2 · (1 + 2/3 + 4/9
    + …) = 3/2, and a lane's below 2. With two lanes it is at most 1/2.
    """

    samples: tuple[int, ...]

    @cached_property
    def _root(self) -> _Split | int:
        lanes = [lane for lane, samples in enumerate(self.samples) if samples]
        return self._split(sorted(lanes, key=lambda lane: -self.samples[lane]))

    def _split(self, lanes: Sequence[int]) -> _Split | int:
        """Return the tree of some lanes, which are in descending order of samples."""
        if len(lanes) == 1:
            return lanes[0]
        *firsts, total = accumulate(self.samples[lane] for lane in lanes)
        cut = min(range(len(firsts)), key=lambda at: abs(2 * firsts[at] - total))
        return _Split(self._split(lanes[: cut + 1]), self._split(lanes[cut + 1 :]), firsts[cut], total)

    def lane(self, place: int) -> int:
        """Return the lane that a place belongs to."""
        node = self._root
        while isinstance(node, _Split):
            firsts = node.before(place)
            if node.before(place + 1) > firsts:
                node, place = node.first, firsts
            else:
                node, place = node.second, place - firsts
        return node

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""
        counts = [0] * len(self.samples)
        groups = [(self._root, place)]
        while groups:
            node, places = groups.pop()
            if isinstance(node, _Split):
                firsts = node.before(places)
                groups += [(node.first, firsts), (node.second, places - firsts)]
            else:
                counts[node] = places
        return counts

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its turn of this number, counted from 0."""
        for split, of_first in self._paths[lane]:
            number = split.place(number, of_first=of_first)
        return number

    @cached_property
    def _paths(self) -> dict[int, list[tuple[_Split, bool]]]:
        """The splits from each lane up to the root, and whether the lane is in the first group of each."""
        paths: dict[int, list[tuple[_Split, bool]]] = {}
        nodes: list[tuple[_Split | int, list[tuple[_Split, bool]]]] = [(self._root, [])]
        while nodes:
            node, above = nodes.pop()
            if isinstance(node, _Split):
                nodes += [(node.first, [(node, True), *above]), (node.second, [(node, False), *above])]
            else:
                paths[node] = above
        return paths


@dataclass(frozen=True, slots=True)
class Blocks:
    """Turns of lanes that take as many places at a time as their `widths`, at least 1."""

    widths: tuple[int, ...]

    def lane(self, place: int) -> int:
        """Return the lane that a place belongs to."""
        nth = place % sum(self.widths)
        return next(lane for lane, end in enumerate(accumulate(self.widths)) if nth < end)

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""
        turn, nth = divmod(place, sum(self.widths))
        starts = accumulate(self.widths[:-1], initial=0)
        each = zip(starts, self.widths, strict=True)
        return [turn * width + min(max(0, nth - start), width) for start, width in each]

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its turn of this number, counted from 0."""
        turn, nth = divmod(number, self.widths[lane])
        return turn * sum(self.widths) + sum(self.widths[:lane]) + nth


Turns: TypeAlias = Proportions | Blocks
"""A sequence of places, each of which belongs to one of several lanes."""


@dataclass(frozen=True)
class Mix:
    """A mixed order of pieces, each of which takes part in `window` steps; 0 and 1 do not mix, 0 is in file order."""

    pieces: Pieces
    window: int = 0

    @property
    def _stay(self) -> int:
        return max(1, self.window)

    @property
    def steps(self) -> int:
        """Number of steps until the last piece has left."""
        return len(self.pieces) + self._stay - 1 if self.pieces else 0

    def pieces_at(self, step: int) -> range:
        """Return the pieces that are in a step."""
        return range(max(0, step - self._stay + 1), min(step + 1, len(self.pieces)))

    def part(self, piece: int, step: int, numbers: Sequence[int]) -> Sequence[int]:
        """Return the samples of a piece that come in a step, in order; `numbers` are all of the piece's samples."""
        start, stop = self._part(len(numbers), step - piece)
        return numbers[start:stop]

    def interleaved(self, step: int, sizes: Sequence[int]) -> list[int]:
        """Return the piece of each sample of a step as an index into `pieces_at(step)`, given the parts' sizes."""
        parts = [place for place, size in enumerate(sizes) for _ in range(size)]
        if len(sizes) <= 1:
            return parts
        last, beyond = self.pieces[min(step, len(self.pieces) - 1)], max(0, step - len(self.pieces))
        return [parts[place] for place in permutation(len(parts), f"{last.own_key}:{last.start}+{beyond}")]

    def _part(self, size: int, nth: int) -> tuple[int, int]:
        """Return the range of a piece's samples for the nth of its steps; rounded so that the first has the most."""
        return -(-size * nth // self._stay), -(-size * (nth + 1) // self._stay)

    # For pieces whose sizes are known

    def __len__(self) -> int:
        return self.pieces.before(len(self.pieces))

    def between(self, start: int, stop: int) -> "Segment":
        """Return the part from one place of the order to a later one."""
        first = self.find(start) if start else (0, 0)
        if stop == len(self):
            return Segment(self, first, None, (start, stop))
        step, nth = self.find(stop - 1)
        return Segment(self, first, (step, nth + 1), (start, stop))

    def find(self, place: int) -> tuple[int, int]:
        """Return the step that contains a place of the whole order, and the place's index in that step."""
        # No sample of a piece comes before the step in which it enters, and none after it has left.
        first = self.pieces.holding(place)
        steps = range(min(self._stay, self.steps - first))
        later = bisect_right(steps, place, key=lambda nth: self._come(first + nth))
        step = first + later
        return step, place - (self._come(step - 1) if step else 0)

    def enters(self, piece: int) -> int:
        """Return the first place at which a piece is held."""
        return self._come(piece - 1) if piece else 0

    def leaves(self, piece: int) -> int:
        """Return the first place at which a piece is no longer held."""
        return self._come(min(piece + self._stay, self.steps) - 1)

    def _come(self, step: int) -> int:
        """Return the number of samples up to the end of a step: all of pieces that have left, parts of the others."""
        held, before = self.pieces_at(step), self.pieces.before
        starts = list(map(before, range(held.start, held.stop + 1)))
        parts = (
            self._part(stop - start, step - piece)[1]
            for piece, (start, stop) in zip(held, pairwise(starts), strict=True)
        )
        return starts[0] + sum(parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of steps in a mix."""

    mix: Mix
    first: tuple[int, int] = (0, 0)  # step in which reading begins, and number of that step's samples to skip
    last: tuple[int, int] | None = None  # step in which it ends, and number of its samples to read; None for all
    span: tuple[int, int] = (0, 0)  # the same range as places of the mix's order, if samples are counted

    @property
    def samples(self) -> int:
        """Number of samples, if they are counted."""
        return self.span[1] - self.span[0]

    @property
    def mixed(self) -> bool:
        """True if the samples of several shards are mixed, or those of one permuted."""
        return self.mix.window > 0

    def between(self, start: int, stop: int) -> "Segment":
        """Return the part from one of these places, counted from 0, to a later one, if samples are counted."""
        return self.mix.between(self.span[0] + start, self.span[0] + stop)

    @property
    def pieces(self) -> range:
        """Pieces that samples come from, in the order in which they enter."""
        begin, end = self.first[0], self.mix.steps - 1 if self.last is None else self.last[0]
        if begin > end:
            return range(0)
        return range(self.mix.pieces_at(begin).start, self.mix.pieces_at(end).stop)


@dataclass(frozen=True, slots=True)
class Slice(ABC):
    """The places `start` to `stop` of a sequence that is no mix: of several lanes, or of some places of a lane."""

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


Part: TypeAlias = Segment | Slice
Lane: TypeAlias = Mix | Slice
"""A sequence of samples of which any part can be read."""


@dataclass(frozen=True, slots=True)
class Interleaved(Slice):
    """Places of lanes that take turns."""

    turns: Turns  # the lane of each place
    lanes: tuple[Lane, ...]  # the samples of each lane from `origin` on
    origin: int = 0  # place of `turns` at which the lanes begin
    names: tuple[str, ...] = ()  # name of each lane, given to its samples; empty for none

    @property
    def mixed(self) -> bool:
        """True if some lane mixes the samples of several shards."""
        return any(part.mixed for part in self.parts().values())

    def _spans(self) -> Iterator[tuple[int, int]]:
        for before, start, stop in zip(*map(self.turns.before, (self.origin, self.start, self.stop)), strict=True):
            yield start - before, stop - before

    def parts(self) -> dict[int, Part]:
        """Return the part of each lane that has any."""
        spans = zip(self.lanes, self._spans(), strict=True)
        return {number: lane.between(*span) for number, (lane, span) in enumerate(spans) if span[0] < span[1]}


@dataclass(frozen=True, slots=True)
class Strided(Slice):
    """Places of a lane at regular distances: `width` places from `first` on, and again after each `period`."""

    lane: Lane
    first: int
    width: int
    period: int

    @property
    def mixed(self) -> bool:
        """True: samples are read by number, from whole shards."""
        return True

    def _place(self, number: int) -> int:
        turn, nth = divmod(number, self.width)
        return self.first + turn * self.period + nth

    def passed_before(self, number: int) -> int:
        """Return the number of places of `passing` before one of these, counted from 0."""
        return self._place(self.start + number) - self._place(self.start)

    def reached_by(self, passed: int) -> int:
        """Return the number of these places before the place `passed` of `passing`."""
        turn, nth = divmod(max(0, self._place(self.start) + passed - self.first), self.period)
        return turn * self.width + min(nth, self.width) - self.start

    def passing(self) -> Part:
        """Return all samples of the lane from the first of these to the last."""
        return self.lane.between(self._place(self.start), self._place(self.stop - 1) + 1)


@dataclass(frozen=True, slots=True)
class Share:
    """Reading of one reader: segments one after another, and their number of samples (None if not counted)."""

    segments: tuple[Part, ...]
    samples: int | None
