"""What a reader is told, with its next shard, of one that it has: that its bytes turned out to be damaged."""

from __future__ import annotations

from typing import Any

from shardcache.cache.readers import Lease

Json = dict[str, Any]


class News:
    """Keeps an eye on what one reader has in hand."""

    def __init__(self) -> None:
        self._lent: dict[int, Lease] = {}
        self._untold: list[Json] = []

    def lent(self, lease: Lease) -> None:
        """Watch a lease that was granted."""
        self._lent[lease.number] = lease

    def over(self, number: int) -> None:
        """Watch a lease no longer; what was found while it lasted is told all the same."""
        lease = self._lent.pop(number, None)
        if lease is not None:
            self._note(lease)

    def take(self) -> Json:
        """Return the field of an answer that tells what is new, or none."""
        for lease in list(self._lent.values()):
            if self._note(lease):
                del self._lent[lease.number]
        untold, self._untold = self._untold, []
        return {"damaged": untold} if untold else {}

    def _note(self, lease: Lease) -> bool:
        lease.look()
        damage = lease.shard.damage if lease.shard is not None and lease.held else None
        if damage is not None:
            self._untold.append(damage.to_json())
        return damage is not None
