"""The sequence in which several lanes take turns, each in proportion to its number of samples. Pure.

Two lanes split a sequence of N places as a line is drawn on a grid: of the first x places, the first lane has n·x/N,
rounded. More lanes split it in two groups, whose places are split in turn, and so on: a binary tree, cut so that both
sides are as equal as possible. Everything about a place is found by going down the tree, without the places before it.

Rounding moves a lane by at most half a place at each split, and each further split scales down the error of those above
it. The heavier side of a split is a single lane or has at most two thirds of the places (if the heaviest lane has less
than a third, a cut lies within a sixth of the middle; if it has a third to a half, the cut behind it leaves less than
two thirds; if more, the rest is less than half). So a group's error is below 1/2 · (1 + 2/3 + 4/9 + …) = 3/2, and a
lane's below 2. With two lanes it is at most 1/2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class _Split:
    """A sequence of `samples` places, of which the first group has `share`, at least 1, and the second has the rest."""

    first: _Split | int
    second: _Split | int
    share: int
    samples: int

    def before(self, place: int) -> int:
        """Return the number of the first group's places before a place."""
        return (2 * self.share * place + self.samples) // (2 * self.samples)

    def place_of_first(self, number: int) -> int:
        """Return the place of the first group's turn of this number."""
        return -((2 * number + 1) * self.samples // (-2 * self.share)) - 1

    def place_of_second(self, number: int) -> int:
        """Return the place of the second group's turn of this number."""
        return (2 * number + 1) * self.samples // (2 * (self.samples - self.share))


@dataclass(frozen=True)
class Proportions:
    """Turns of lanes with given numbers of samples, as evenly spread as described above.

    Among the first x of all N places, a lane with n samples has n·x/N of them, with an error below 2; exactly n of all.

    Attributes:
        samples: number of samples of each lane; may be 0.
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
        for split, is_first in self._paths[lane]:
            number = split.place_of_first(number) if is_first else split.place_of_second(number)
        return number

    @cached_property
    def _paths(self) -> dict[int, tuple[tuple[_Split, bool], ...]]:
        """The splits from each lane up to the root, and whether the lane is in the first group of each."""
        return dict(_paths(self._root, ()))


def _paths(
    node: _Split | int, above: tuple[tuple[_Split, bool], ...]
) -> Iterator[tuple[int, tuple[tuple[_Split, bool], ...]]]:
    if isinstance(node, _Split):
        yield from _paths(node.first, ((node, True), *above))
        yield from _paths(node.second, ((node, False), *above))
    else:
        yield node, above
