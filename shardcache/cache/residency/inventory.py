"""Reference counts of shards in use, which must stay: each lease and each check of a file is a hold."""

from __future__ import annotations

from shardcache.cache.planner import Planner
from shardcache.cache.residency.page_cache import Pages
from shardcache.cache.signal import Signal
from shardcache.store.shard import Shard
from shardcache.store.store import Store


class Inventory:
    """Counts holds, and informs the plan of a shard's first hold and the end of its last.

    Attributes:
        shards: the shards in use.
    """

    def __init__(self, store: Store, planner: Planner, pages: Pages, changed: Signal) -> None:
        self._store = store
        self._planner = planner
        self._pages = pages
        self._changed = changed
        self.shards: set[Shard] = set()

    def take(self, shard: Shard) -> None:
        """Hold a shard, so that it is not evicted, until `drop`."""
        shard.leases += 1
        self.shards.add(shard)
        if shard.leases == 1 and self._is_here(shard):
            self._planner.now.held(shard.key)

    def try_take(self, key: str) -> Shard | None:
        """Hold the cached shard for `key`, if there is one, and return it."""
        shard = self._store.shards.get(key)
        if shard is not None:
            self.take(shard)
        return shard

    def drop(self, shard: Shard) -> None:
        """Drop one hold."""
        shard.leases -= 1
        if not shard.leases:
            self.shards.discard(shard)
            if self._is_here(shard):
                if not shard.stays:
                    self._planner.now.freed(shard.key)
                self._pages.idle(shard)
        self._changed.notify()

    def _is_here(self, shard: Shard) -> bool:
        return self._store.shards.get(shard.key) is shard  # a damaged shard may be quarantined while held
