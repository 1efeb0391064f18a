"""Quarantine of published shards whose bytes no longer match their checksums."""

from __future__ import annotations

import structlog

from shardcache.cache.residency.disk_health import Health
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.signal import Signal
from shardcache.errors import CacheError, CorruptShardError
from shardcache.metrics import Counters
from shardcache.store.shard import Shard
from shardcache.store.store import Store

log = structlog.get_logger()


class Quarantine:
    """Takes corrupt shards out of service, unless the disk as a whole cannot be read."""

    def __init__(self, store: Store, inventory: Inventory, health: Health, counters: Counters, changed: Signal) -> None:
        self._store = store
        self._inventory = inventory
        self._health = health
        self._counters = counters
        self._changed = changed

    async def found(self, shard: Shard, exn: CorruptShardError) -> bool:
        """Take a shard out of service; False if the disk has failed, which proves nothing about the shard."""
        if not await self._health.examine():
            return False
        shard.damage = exn
        if shard.leases:
            log.error("corrupt shard is in use", shard=exn.url, leases=shard.leases)
        await self.isolate(shard, exn)
        return True

    async def isolate(self, shard: Shard, exn: CorruptShardError) -> None:
        """Take a corrupt shard out of service; the next request re-fetches it."""
        if self._store.shards.get(shard.key) is not shard:
            return  # evicted or quarantined, and perhaps re-fetched, during the check
        log.error("cached shard is damaged; quarantined", shard=exn.url, cause=exn.message)
        self._counters.corrupt += 1
        self._inventory.gone(shard.key)
        try:
            await self._store.quarantine(shard)
        except CacheError as failure:  # it is out of service in any case
            log.warning("cannot move the corrupt shard to quarantine yet", shard=exn.url, cause=failure.message)
        self._changed.notify()
