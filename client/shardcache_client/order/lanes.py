"""Several lanes read as one sequence, in turns: the samples of several sources, or of several spans. Pure.

The turns alone determine which lane has a place of the sequence, so any part of it can be found without what comes
before, and the order in which the shards of all lanes are needed is known in advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from shardcache_client.order.share import Lane, Part, Slice


class LaneTurns(Protocol):
    """A sequence of places, each of which belongs to one of several lanes."""

    def lane(self, place: int) -> int:
        """Return the lane that a place belongs to."""

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its turn of this number, counted from 0."""


@dataclass(frozen=True, slots=True)
class Interleaved(Slice):
    """Places of lanes that take turns.

    Attributes:
        turns: the lane of each place.
        lanes: the samples of each lane from `origin` on.
        origin: place of `turns` at which the lanes begin.
        names: name of each lane, given to its samples; empty for none.
    """

    turns: LaneTurns
    lanes: tuple[Lane, ...]
    origin: int = 0
    names: tuple[str, ...] = ()

    @property
    def mixed(self) -> bool:
        """True if some lane mixes the samples of several shards."""
        return any(part.mixed for part in self.parts().values())

    def counts(self) -> list[int]:
        """Return the number of samples of each lane."""
        return [stop - start for start, stop in self._spans()]

    def _spans(self) -> Iterator[tuple[int, int]]:
        for before, start, stop in zip(*map(self.turns.before, (self.origin, self.start, self.stop)), strict=True):
            yield start - before, stop - before

    def parts(self) -> dict[int, Part]:
        """Return the part of each lane that has any."""
        spans = zip(self.lanes, self._spans(), strict=True)
        return {number: lane.between(*span) for number, (lane, span) in enumerate(spans) if span[0] < span[1]}

    def in_turn(self) -> Iterator[int]:
        """Yield the lane of each place."""
        return map(self.turns.lane, range(self.start, self.stop))

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each shard with the number of samples before the first that needs it: (samples, shard), in order."""
        before = self.turns.before(self.start)
        entries = [
            (self.turns.place(lane, before[lane] + number) - self.start, shard)
            for lane, part in self.parts().items()
            for number, shard in part.entries()
        ]
        # Two lanes never share a place; a lane's own shards keep their order.
        return iter(sorted(entries, key=lambda entry: entry[0]))


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

    def passing(self) -> Part:
        """Return all samples of the lane from the first of these to the last."""
        return self.lane.between(self._place(self.start), self._place(self.stop - 1) + 1)

    def places(self) -> Iterator[int]:
        """Yield the place of each sample in `passing`."""
        first = self._place(self.start)
        return (self._place(number) - first for number in range(self.start, self.stop))

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each shard with the number of samples before the first that needs it: (samples, shard), in order."""
        first = self._place(self.start)
        for passed, shard in self.passing().entries():
            turn, nth = divmod(max(0, first + passed - self.first), self.period)
            yield turn * self.width + min(nth, self.width) - self.start, shard


@dataclass(frozen=True, slots=True)
class Blocks:
    """Turns of lanes that take several places at a time, always the same number.

    Attributes:
        widths: number of places that each lane takes at a time, at least 1.
    """

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
