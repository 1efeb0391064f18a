"""What becomes of a published shard that reads otherwise than it arrived."""

from __future__ import annotations

import structlog

from shardcache.cache.health import Health
from shardcache.cache.leasing import Leasing
from shardcache.errors import CorruptShardError
from shardcache.store.shard import Shard

log = structlog.get_logger()


class Damage:
    """Takes damaged shards out of service, unless it is the whole disk that cannot be read."""

    def __init__(self, health: Health, leasing: Leasing) -> None:
        self._health = health
        self._leasing = leasing

    async def found(self, shard: Shard, exn: CorruptShardError) -> bool:
        """Take a shard out of service; False where the disk is not well, which says nothing of the shard."""
        if not await self._health.examine():
            return False
        shard.damage = exn
        if shard.leases:
            log.error("a damaged shard is being read", shard=exn.url, leases=shard.leases)
        await self._leasing.quarantine(shard, exn)
        return True
