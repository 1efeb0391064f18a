"""Published files for leases: found in the cache, or fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shardcache.cache.disk import Quarantine
from shardcache.cache.planner import name_of
from shardcache.cache.transfers import Transfers
from shardcache.cache.versions import History, Revalidation
from shardcache.cache.waits import Arrival, Class, Wait
from shardcache.errors import CorruptShardError
from shardcache.protocol import ShardRef
from shardcache.store.folder import shard_key
from shardcache.store.shard import Facts, Shard

# Urls looked up at a time: larger batches would block the event loop.
_RECALLED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Published:
    """A cached shard, to be retained before the next await. `hit`: it did not have to be fetched."""

    shard: Shard
    facts: Facts
    hit: bool


class Leasing:
    """Finds or fetches the published file of a planned shard."""

    def __init__(
        self, transfers: Transfers, quarantine: Quarantine, history: History, revalidation: Revalidation
    ) -> None:
        self.inventory = quarantine.inventory
        self.transfers = transfers
        self.history = history
        self.store = self.inventory.store
        self._planner = self.inventory.planner
        self._aliases = self.inventory.planner.aliases
        self._revalidation = revalidation
        self._quarantine = quarantine

    async def recall(self, refs: Iterable[ShardRef]) -> None:
        """Restore the versions of bare urls cached before the last restart; `acquire` revalidates them."""
        unknown = [ref.url for ref in refs if ref.version is None and self._aliases.key(ref.url) == ref.url]
        for first in range(0, len(unknown), _RECALLED_AT_ONCE):
            urls = unknown[first : first + _RECALLED_AT_ONCE]
            for url, version in zip(urls, await self.history.versions(urls), strict=True):
                if version is not None and shard_key(url, version) in self.store.shards:
                    self._aliases.learn(url, shard_key(url, version), now_s=float("-inf"))

    async def acquire(self, ref: ShardRef, wanted: Class, wait: Wait) -> Published | Arrival:
        """Return the published shard, or early access to it if `wait` accepts that; fetch it if it is missing.

        Raises every error that fetching it can raise.
        """
        name = name_of(ref)
        shard = await self._present(name, ref)
        hit = shard is not None
        while True:
            if shard is None:
                found = await self.transfers.wait(name, ref, wanted, wait)
                if isinstance(found, Arrival):
                    return found
                # The published shard may have been evicted before this task runs: check again.
                shard = self.store.shards.get(found.key)
            elif (facts := await self._facts(shard, ref.url)) and self.store.shards.get(shard.key) is shard:
                if hit:
                    self._planner.now.found(shard.key)
                return Published(shard, facts, hit)
            else:
                shard, hit = None, False

    @asynccontextmanager
    async def published(self, ref: ShardRef) -> AsyncIterator[Published]:
        """Provide a shard, fetched if it is missing, and keep it during the block. Raises as `acquire` does."""
        found = await self.acquire(ref, Class.WARM, Wait())
        assert isinstance(found, Published)  # this wait does not accept a partial shard
        self.inventory.retain(found.shard)
        try:
            yield found
        finally:
            await self.release(found.shard)

    async def release(self, shard: Shard) -> None:
        """Release a retained shard and record this as the time of its last use."""
        self.store.touch(shard)
        self.inventory.release(shard)
        if not shard.leases:
            await self.store.remember_use(shard)

    async def _facts(self, shard: Shard, url: str) -> Facts | None:
        """Return the facts of a cached shard; None if it is damaged. Raises DiskError if the disk has failed."""
        with self.inventory.retained(shard):
            try:
                fresh = shard.facts is None
                facts = await self.store.facts(shard)
                if fresh:
                    await self.history.remember(facts)
            except CorruptShardError as exn:
                await self._quarantine.health.examine()
                self._quarantine.health.check(url)  # an unmounted disk proves nothing about its shards
                await self._quarantine.isolate(shard, exn)
                return None
            self.store.touch(shard)
            return facts

    async def _present(self, name: str, ref: ShardRef) -> Shard | None:
        """Return the shard if it is cached; if no version is given, the origin's last known one."""
        if ref.version is None:
            await self._revalidation.check(name, ref.url)
        return self.store.shards.get(self._aliases.key(name))
