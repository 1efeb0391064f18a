"""Residency: the cached shards, and what keeps each of them in place: leases, a pin, a process that has it open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.planner import Planner
from shardcache.cache.signal import Signal
from shardcache.store.shard import Shard
from shardcache.store.store import Store

# Closing a file in another process notifies nobody: what depends on it is checked again after this time.
LOOK_AGAIN_S = 1.0


class Inventory:
    """The cached shards, and whether each may be evicted.

    Nothing else writes `Shard.leases` and `Shard.pinned`, or tells the plan which shards are cached and evictable.

    Attributes:
        leased: the shards with leases, including damaged ones already in quarantine.
        pinned: the cached shards that are pinned, by key.
    """

    def __init__(self, store: Store, planner: Planner, aliases: AliasTable, changed: Signal) -> None:
        self.leased: set[Shard] = set()
        self.pinned: dict[str, Shard] = {}
        self._still_open: dict[Shard, float] = {}  # shards whose removal failed, and when
        self._store = store
        self._planner = planner
        self._aliases = aliases
        self._changed = changed
        now = planner.now
        for shard in store.shards.values():
            now.arrived(shard.key, shard.kept_bytes)

    def published(self, shard: Shard) -> None:
        """Add a newly cached shard."""
        self._planner.now.arrived(shard.key, shard.kept_bytes)

    def gone(self, key: str) -> None:
        """Remove a shard that was evicted, quarantined or lost; its leases last until they are released."""
        self.unpin(key)
        self._planner.now.gone(key)
        self._aliases.forget(key)
        self._changed.notify()

    def retain(self, shard: Shard) -> None:
        """Keep a shard until `release`."""
        shard.leases += 1
        self.leased.add(shard)
        self._tell_plan(shard)

    def retain_cached(self, key: str) -> Shard | None:
        """Keep the cached shard for `key` until `release`, and return it; None if there is none."""
        shard = self._store.shards.get(key)
        if shard is not None:
            self.retain(shard)
        return shard

    def release(self, shard: Shard) -> None:
        """End one `retain`."""
        shard.leases -= 1
        if not shard.leases:
            self.leased.discard(shard)
            self._tell_plan(shard)
        self._changed.notify()

    @contextmanager
    def retained(self, shard: Shard) -> Iterator[None]:
        """Keep a shard while it is examined."""
        self.retain(shard)
        try:
            yield
        finally:
            self.release(shard)

    def pin(self, key: str) -> None:
        """Keep the cached shard for `key`, if there is one, until `unpin`."""
        shard = self._store.shards.get(key)
        if shard is not None and not shard.pinned:
            shard.pinned, self.pinned[key] = True, shard
            self._store.space.pinned_bytes += shard.kept_bytes
            self._tell_plan(shard)

    def unpin(self, key: str) -> None:
        """End `pin`; no-op if no cached shard for `key` is pinned."""
        shard = self.pinned.pop(key, None)
        if shard is not None:
            shard.pinned = False
            self._store.space.pinned_bytes -= shard.kept_bytes
            self._tell_plan(shard)
            self._changed.notify()

    @contextmanager
    def evicting(self, shard: Shard) -> Iterator[None]:
        """Make a shard no candidate for eviction while it is removed; if that fails, until `look_again`."""
        self._planner.now.held(shard.key)
        try:
            yield
        finally:
            if self._is_cached(shard):  # a process has it open, or the disk failed
                self._still_open[shard] = time.monotonic()
            elif shard.key not in self._store.shards:
                self.gone(shard.key)

    def look_again(self) -> None:
        """Make shards evictable again that could not be removed a while ago."""
        limit_s = time.monotonic() - LOOK_AGAIN_S
        for shard in [shard for shard, since_s in self._still_open.items() if since_s <= limit_s]:
            del self._still_open[shard]
            self._tell_plan(shard)

    def _tell_plan(self, shard: Shard) -> None:
        if self._is_cached(shard):
            now = self._planner.now
            (now.held if shard.stays else now.freed)(shard.key)

    def _is_cached(self, shard: Shard) -> bool:
        return self._store.shards.get(shard.key) is shard  # a corrupt shard may be quarantined while leased
