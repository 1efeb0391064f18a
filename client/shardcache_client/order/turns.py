"""The sequence in which several lanes take turns: in proportion to their numbers of samples, or in blocks. Pure.

Two lanes split a sequence of N places as a line is drawn on a grid: of the first x places, the first lane has n·x/N,
rounded. More lanes split it in two groups, whose places are split in turn, and so on: a binary tree, cut so that both
sides are as equal as possible. Everything about a place is found by going down the tree, without the places before it.

Rounding moves a lane by at most half a place at each split, and each further split scales down the error of those above
it. The heavier side of a split is a single lane or has at most two thirds of the places (if the heaviest lane has less
than a third, a cut lies within a sixth of the middle; if it has a third to a half, the cut behind it leaves less than
two thirds; if more, the rest is less than half). So a group's error is below 1/2 · (1 + 2/3 + 4/9 + …) = 3/2, and a
lane's below 2. With two lanes it is at most 1/2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias


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
    """Turns of lanes with given numbers of samples, as evenly spread as described above.

    Among the first x of all N places, a lane with n samples has n·x/N of them, with an error below 2; exactly n of all.
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
