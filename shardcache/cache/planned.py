"""Shards as plans name them: one object for each, however many plans name it.

Sixty-four readers of ten thousand shards would else have the same things in memory sixty-four times, and the garbage
collector would look at each of them while everybody waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from shardcache.cache.names import Names
from shardcache.protocol import ShardRef

_Row = tuple[str, str | None, int | None, int | None]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Planned:
    """A shard of a plan, and the name under which the cache knows it."""

    name: str
    ref: ShardRef


class PlannedShards:
    """Those of all plans; one that no plan names any more is forgotten."""

    def __init__(self) -> None:
        self._shards: WeakValueDictionary[_Row, Planned] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"PlannedShards({len(self._shards)})"

    def __len__(self) -> int:
        return len(self._shards)

    def of(self, ref: ShardRef) -> Planned:
        """Return the shard that equals a plan's."""
        row = (ref.url, ref.version, ref.size_bytes, ref.samples)
        planned = self._shards.get(row)
        if planned is None:
            planned = self._shards[row] = Planned(Names.of(ref), ref)
        return planned
