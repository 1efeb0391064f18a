"""Damage notices: with its next shard, a reader learns that a shard it has leased is damaged."""

from __future__ import annotations

from typing import Any

from shardcache.cache.readers import Lease

Json = dict[str, Any]


class DamageNotices:
    """Watches one reader's leased shards for damage."""

    def __init__(self) -> None:
        self._lent: dict[int, Lease] = {}
        self._untold: list[Json] = []

    def lent(self, lease: Lease) -> None:
        """Start watching a lease."""
        self._lent[lease.number] = lease

    def over(self, number: int) -> None:
        """Stop watching a lease; damage found while its shard was in use is still reported."""
        lease = self._lent.pop(number, None)
        if lease is not None:
            self._note(lease)

    def take(self) -> Json:
        """Return the answer's field with the new damage notices; empty if there are none."""
        for lease in list(self._lent.values()):
            if self._note(lease):
                del self._lent[lease.number]
        untold, self._untold = self._untold, []
        return {"damaged": untold} if untold else {}

    def _note(self, lease: Lease) -> bool:
        damage = None if lease.retained is None else lease.retained.damage
        if damage is not None:
            self._untold.append(damage.to_json())
        return damage is not None
