"""Several lanes read as one sequence, in turns: the samples of several sources, or of several spans. Pure.

A lane is a mix of shards, or an interleaving in turn. `LaneTurns` alone determines which lane has a place of the
sequence, so any part of it can be found without what comes before, and the order in which the shards of all lanes are
needed is known in advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardcache_client.order.lanes.proportions import LaneTurns
from shardcache_client.order.mix import Mix
from shardcache_client.order.share import Part, Segment, Slice


class Divisible(Protocol):
    """A sequence of samples, such as an interleaving, of which any part can be read."""

    def between(self, start: int, stop: int, /) -> Slice:
        """Return the part from one place of the sequence to a later one."""


Lane: TypeAlias = Mix | Divisible


@dataclass(frozen=True)
class Interleaving:
    """Lanes that take turns.

    Attributes:
        turns: the lane of each place.
        lanes: the samples of each lane from `start` on.
        start: place of `turns` at which this sequence begins.
        names: name of each lane, given to its samples; empty for none.
    """

    turns: LaneTurns
    lanes: tuple[Lane, ...]
    start: int = 0
    names: tuple[str, ...] = ()

    def between(self, start: int, stop: int) -> Interleaved:
        """Return the part from one place of this sequence to a later one."""
        return Interleaved(start, stop, self)


@dataclass(frozen=True, slots=True)
class Interleaved(Slice):
    """A part of an interleaving."""

    whole: Interleaving

    @property
    def mixed(self) -> bool:
        """True if some lane mixes the samples of several shards."""
        return any(part.mixed for part in self.parts().values())

    def counts(self) -> list[int]:
        """Return the number of samples of each lane."""
        return [stop - start for start, stop in self._spans()]

    def _spans(self) -> Iterator[tuple[int, int]]:
        turns, origin = self.whole.turns, self.whole.start
        places = (origin, origin + self.start, origin + self.stop)
        for before, start, stop in zip(*map(turns.before, places), strict=True):
            yield start - before, stop - before

    def parts(self) -> dict[int, Part]:
        """Return the part of each lane that has any."""
        spans = zip(self.whole.lanes, self._spans(), strict=True)
        return {number: between(lane, *span) for number, (lane, span) in enumerate(spans) if span[0] < span[1]}

    def turns(self) -> Iterator[int]:
        """Yield the lane of each place."""
        origin = self.whole.start
        return map(self.whole.turns.lane, range(origin + self.start, origin + self.stop))

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each shard with the number of samples before the first that needs it: (samples, shard), in order."""
        turns, first = self.whole.turns, self.whole.start + self.start
        before = turns.before(first)
        entries = [
            (turns.place(lane, before[lane] + number) - first, shard)
            for lane, part in self.parts().items()
            for number, shard in part.entries()
        ]
        # Two lanes never share a place; a lane's own shards keep their order.
        return iter(sorted(entries, key=lambda entry: entry[0]))


def between(lane: Lane, start: int, stop: int) -> Part:
    """Return the part of a lane from one place of its order to a later one."""
    return Segment.between(lane, start, stop) if isinstance(lane, Mix) else lane.between(start, stop)
