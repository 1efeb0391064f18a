"""Turns of lanes: to which of several sequences each place of their interleaving belongs. Pure.

- A lane is one of several sequences of samples that are read as one: a source of a mixture, or a
  span of an epoch, which is a run of its consecutive samples.
- A place is the number of a sample in the combined sequence, from 0.
- Turns are the numbers of the lanes that the places belong to, one for each place.

Each class here answers three questions: `lane` tells which lane has a place, `before` how many
places each lane has before a place, and `place` at which place a lane has its nth sample. With the
turns 0 1 0 0 1 0, `lane(4)` is 1, `before(4)` is [3, 1], and `place(1, 1)` is 4.

The turns alone determine these answers. So any part of the combined sequence can be found without
computing the places before it. `lanes.Interleaved` uses turns to read, and `sources.layouts` to lay
out the epochs of a mixture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

# The golden section, in units of 1e-9: whole numbers give the same result on every machine.
_GOLDEN_BILLIONTHS = 618_033_989


@dataclass(frozen=True, slots=True)
class _Split:
    """A sequence of places that belong to two groups of lanes.

    Attributes:
        first: the split of the first group, or the number of its only lane.
        second: the split of the second group, or the number of its only lane.
        first_places: number of places of the first group, at least 1; the second group has the
            others, at least 1.
        places: number of places of both groups together.
    """

    first: "_Split | int"
    second: "_Split | int"
    first_places: int
    places: int

    def before(self, place: int) -> int:
        """Return the number of the first group's places before a place."""
        # This is first_places * place / places, rounded to the nearest whole number.
        return (2 * self.first_places * place + self.places) // (2 * self.places)

    def place(self, number: int, *, of_first: bool) -> int:
        """Return the place of the split that is the nth place of one group.

        Args:
            number: n, from 0.
            of_first: True for the first group, False for the second.
        """
        # A group gets its nth place when its exact number of places comes to n + 1/2, which is
        # after `halves / (2 * places of the group)` places. As `before` rounds a half up, the first
        # group has the place that reaches this number, and the second the place that exceeds it.
        halves = (2 * number + 1) * self.places
        if of_first:
            return -(-halves // (2 * self.first_places)) - 1
        return halves // (2 * (self.places - self.first_places))


_Path: TypeAlias = list[tuple[_Split, bool]]
"""The splits from a lane up to the root; with each, True if the lane is in its first group."""


@dataclass(frozen=True)
class Proportions:
    """Turns of lanes with given numbers of samples, spread evenly.

    Of the first x of N places, a lane with n samples has n·x/N, ± 2. Lanes with 6, 3 and 1 samples
    have the turns 0 1 0 1 0 0 2 0 1 0.

    Two lanes split a sequence of N places as a line is drawn on a grid: of the first x places, the
    first lane has n·x/N, rounded. More than two lanes form two groups, and each group splits its
    places in the same way. This makes a binary tree, cut so that both sides of each split are as
    equal as possible: in the example, lane 0 has 6 of 10 places, and lanes 1 and 2 split the other
    4. Everything about a place is found by going down the tree, without the places before it.

    Rounding moves a lane by at most half a place at each split, and each further split scales down
    the error of the splits above it. The heavier side of a split is a single lane or has at most
    two thirds of the places, as `_split` shows. So a group's error is below 1/2 · (1 + 2/3 + 4/9 +
    …) = 3/2, and a lane's error is below 2. With two lanes it is at most 1/2.

    Attributes:
        samples: number of samples of each lane. The same turns repeat after all of them.
    """

    samples: tuple[int, ...]

    @cached_property
    def _root(self) -> _Split | int:
        """The tree of all lanes that have samples; the number of the lane if there is only one."""
        lanes = [lane for lane, samples in enumerate(self.samples) if samples]
        return self._split(sorted(lanes, key=lambda lane: -self.samples[lane]))

    def _split(self, lanes: Sequence[int]) -> _Split | int:
        """Return the tree of some lanes, which are in descending order of samples."""
        if len(lanes) == 1:
            return lanes[0]
        *firsts, total = accumulate(self.samples[lane] for lane in lanes)
        # The first group ends with the lane of index `cut`: both groups are as equal as possible.
        # So a group of several lanes has at most two thirds of all places:
        # 1. If the heaviest lane has less than a third, some cut lies within a sixth of the middle.
        # 2. If it has a third to a half, the cut after it leaves at most two thirds.
        # 3. If it has more than a half, it is the first group, and less than half is left.
        cut = min(range(len(firsts)), key=lambda at: abs(2 * firsts[at] - total))
        return _Split(
            first=self._split(lanes[: cut + 1]),
            second=self._split(lanes[cut + 1 :]),
            first_places=firsts[cut],
            places=total,
        )

    def lane(self, place: int) -> int:
        """Return the number of the lane that a place belongs to."""
        node = self._root
        while isinstance(node, _Split):
            first_count = node.before(place)
            # The place is the first group's if that group has one place more after it.
            if node.before(place + 1) > first_count:
                node = node.first
                place = first_count
            else:
                node = node.second
                place -= first_count
        return node

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""
        counts = [0] * len(self.samples)
        groups = [(self._root, place)]
        while groups:
            node, places = groups.pop()
            if isinstance(node, _Split):
                first_count = node.before(places)
                groups += [(node.first, first_count), (node.second, places - first_count)]
            else:
                counts[node] = places
        return counts

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its sample of this number, counted from 0."""
        for split, of_first in self._paths[lane]:
            number = split.place(number, of_first=of_first)
        return number

    @cached_property
    def _paths(self) -> dict[int, _Path]:
        """The path of each lane, by the lane's number."""
        paths: dict[int, _Path] = {}
        nodes: list[tuple[_Split | int, _Path]] = [(self._root, [])]
        while nodes:
            node, above = nodes.pop()
            if isinstance(node, _Split):
                nodes += [
                    (node.first, [(node, True), *above]),
                    (node.second, [(node, False), *above]),
                ]
            else:
                paths[node] = above
        return paths


@dataclass(frozen=True, slots=True)
class BlockTurns:
    """Turns of lanes that each take a fixed number of places at a time, in endless cycles.

    With the widths 2 and 3, the places belong to the lanes 0 0 1 1 1 0 0 1 1 1.

    Attributes:
        widths: number of places that each lane takes at a time, at least 1.
    """

    widths: tuple[int, ...]

    def lane(self, place: int) -> int:
        """Return the lane that a place belongs to."""
        place_in_cycle = place % sum(self.widths)
        ends = accumulate(self.widths)
        return next(lane for lane, end in enumerate(ends) if place_in_cycle < end)

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""
        cycles, place_in_cycle = divmod(place, sum(self.widths))
        counts = []
        start = 0
        for width in self.widths:
            in_cycle = min(max(0, place_in_cycle - start), width)
            counts.append(cycles * width + in_cycle)
            start += width
        return counts

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its sample of this number, counted from 0."""
        cycles, nth = divmod(number, self.widths[lane])
        return cycles * sum(self.widths) + sum(self.widths[:lane]) + nth


@dataclass(frozen=True)
class Rotated:
    """Turns that are cut into spans of `length` places, each rotated by a distance of its own.

    Lanes with 8 and 4 samples have the turns 0 1 0 0, 1 0 0 1 and 0 0 1 0 in spans of 4. Rotated by
    0, 2 and 0, the spans have 0 1 0 0, 0 1 1 0 and 0 0 1 0.

    So spans that are read side by side have different lanes at most times, even if the turns repeat
    a pattern. The distances are spread by the golden section, which fits no such pattern.

    Attributes:
        turns: the turns before the rotation.
        length: number of places of a span.
    """

    turns: Proportions
    length: int

    def _span(self, place: int) -> tuple[int, int, int]:
        """Return the span of a place, as `begin`, `first` and `number`.

        `begin` is the first place of the span, `first` the place of `turns` whose turn comes first
        in the rotated span, and `number` the place's own number in its span, from 0.
        """
        span, number = divmod(place, self.length)
        begin = span * self.length
        shift = begin * _GOLDEN_BILLIONTHS // 10**9 % self.length
        return begin, begin + shift, number

    def lane(self, place: int) -> int:
        """Return the lane that a place belongs to."""
        begin, first, number = self._span(place)
        # The turn is `number` places after `first`; behind the span's end, it is at its beginning.
        return self.turns.lane(begin + (first - begin + number) % self.length)

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""
        begin, first, number = self._span(place)
        end = begin + self.length
        # Before the place come all turns of earlier spans, then the turns of this span from `first`
        # to its end, and then those from its beginning. All three are runs of places of `turns`.
        runs = [
            (0, begin),
            (first, min(first + number, end)),
            (begin, max(begin, first + number - self.length)),
        ]
        counts = [0] * len(self.turns.samples)
        for start, stop in runs:
            each = zip(counts, self.turns.before(start), self.turns.before(stop), strict=True)
            counts = [count + after - before for count, before, after in each]
        return counts

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its sample of this number, counted from 0."""
        # Rotation moves turns within their spans: the sample's span is the same without it.
        begin, first, _ = self._span(self.turns.place(lane, number))
        end = begin + self.length
        at_begin = self.turns.before(begin)[lane]
        at_first = self.turns.before(first)[lane]
        at_end = self.turns.before(end)[lane]

        # The span has the turns from `first` to its end, which move to its beginning, and then the
        # turns before `first`, which move behind them.
        nth = number - at_begin  # among the lane's samples in this span
        before_wrap = at_end - at_first
        if nth < before_wrap:
            unrotated = self.turns.place(lane, at_first + nth)
            return unrotated - (first - begin)
        unrotated = self.turns.place(lane, at_begin + nth - before_wrap)
        return unrotated + (end - first)


@dataclass(frozen=True)
class Widened:
    """Other turns, each repeated `width` times: 0 1 0 with a width of 2 becomes 0 0 1 1 0 0.

    Attributes:
        turns: the other turns.
        width: number of places in a row for each of them.
    """

    turns: Proportions | Rotated
    width: int

    def lane(self, place: int) -> int:
        """Return the lane that a place belongs to."""
        return self.turns.lane(place // self.width)

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""
        turn, nth = divmod(place, self.width)
        counts = [self.width * count for count in self.turns.before(turn)]
        if nth:
            counts[self.turns.lane(turn)] += nth
        return counts

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its sample of this number, counted from 0."""
        turn, nth = divmod(number, self.width)
        return self.turns.place(lane, turn) * self.width + nth


Turns: TypeAlias = Proportions | BlockTurns | Rotated | Widened
"""The lanes that the places of a combined sequence belong to."""
