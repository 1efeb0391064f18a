"""Interning of plan entries: one object per shard, however many plans name it.

Without it, 64 readers of ten thousand shards would keep 64 copies of each entry in memory, all of which the garbage
collector would scan while the daemon stands still.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.protocol import ShardRef

_Row = tuple[str, str | None, int | None, int | None]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Planned:
    """A plan entry: a shard and its name in the cache."""

    name: str
    ref: ShardRef


class PlannedShards:
    """The entries of all plans; an entry disappears with the last plan that names it."""

    def __init__(self) -> None:
        self._shards: WeakValueDictionary[_Row, Planned] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"PlannedShards({len(self._shards)})"

    def __len__(self) -> int:
        return len(self._shards)

    def of(self, ref: ShardRef) -> Planned:
        """Return the shared entry for a shard."""
        row = (ref.url, ref.version, ref.size_bytes, ref.samples)
        planned = self._shards.get(row)
        if planned is None:
            planned = self._shards[row] = Planned(AliasTable.of(ref), ref)
        return planned
