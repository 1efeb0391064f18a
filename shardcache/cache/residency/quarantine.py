"""Quarantine of published shards whose bytes no longer match their checksums."""

from __future__ import annotations

import structlog

from shardcache.cache.readers.leasing import Leasing
from shardcache.cache.residency.disk_health import Health
from shardcache.errors import CorruptShardError
from shardcache.store.shard import Shard

log = structlog.get_logger()


class Quarantine:
    """Takes damaged shards out of service, unless the disk as a whole cannot be read."""

    def __init__(self, health: Health, leasing: Leasing) -> None:
        self._health = health
        self._leasing = leasing

    async def found(self, shard: Shard, exn: CorruptShardError) -> bool:
        """Take a shard out of service; False if the disk has failed, which proves nothing about the shard."""
        if not await self._health.examine():
            return False
        shard.damage = exn
        if shard.leases:
            log.error("damaged shard is in use", shard=exn.url, leases=shard.leases)
        await self._leasing.quarantine(shard, exn)
        return True
