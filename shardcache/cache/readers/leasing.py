"""Published files for leases: found in the cache, or fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.catalog.history import History
from shardcache.cache.catalog.revalidation import Revalidation
from shardcache.cache.planner import Planner
from shardcache.cache.residency.disk_health import Health
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.residency.quarantine import Quarantine
from shardcache.cache.transfers.arriving import Arrival
from shardcache.cache.transfers.transfers import Class, Transfers
from shardcache.cache.transfers.waiting import Wait
from shardcache.errors import CorruptShardError
from shardcache.protocol import ShardRef
from shardcache.store.folder import shard_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store

# Urls looked up at a time: larger batches would block the event loop.
_RECALLED = 1_000


@dataclass(frozen=True, slots=True)
class Published:
    """A cached shard, to be retained before the next await. `hit`: it did not have to be fetched."""

    shard: Shard
    facts: Facts
    hit: bool


class Leasing:
    """Finds or fetches the published file of a planned shard."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        inventory: Inventory,
        planner: Planner,
        aliases: AliasTable,
        history: History,
        revalidation: Revalidation,
        health: Health,
        quarantine: Quarantine,
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._inventory = inventory
        self._planner = planner
        self._aliases = aliases
        self._history = history
        self._revalidation = revalidation
        self._health = health
        self._quarantine = quarantine

    async def recall(self, refs: Iterable[ShardRef]) -> None:
        """Restore the versions of bare urls cached before the last restart; `acquire` revalidates them."""
        unknown = [ref.url for ref in refs if ref.version is None and self._aliases.key(ref.url) == ref.url]
        for first in range(0, len(unknown), _RECALLED):
            urls = unknown[first : first + _RECALLED]
            for url, version in zip(urls, await self._history.versions(urls), strict=True):
                if version is not None and shard_key(url, version) in self._store.shards:
                    self._aliases.learn(url, shard_key(url, version), now_s=float("-inf"))

    async def acquire(self, ref: ShardRef, wanted: Class, wait: Wait) -> Published | Arrival:
        """Return the published shard, or early access to it if `wait` accepts that; fetch it if it is missing.

        Raises every error that fetching it can raise.
        """
        name = AliasTable.of(ref)
        shard = await self._present(name, ref)
        hit = shard is not None
        while True:
            if shard is None:
                found = await self._transfers.wait(name, ref, wanted, wait)
                if isinstance(found, Arrival):
                    return found
                # The published shard may have been evicted before this task runs: check again.
                shard = self._store.shards.get(found.key)
            elif (facts := await self._facts(shard, ref.url)) and self._store.shards.get(shard.key) is shard:
                if hit:
                    self._planner.now.found(shard.key)
                return Published(shard, facts, hit)
            else:
                shard, hit = None, False

    @asynccontextmanager
    async def using(self, shard: Shard) -> AsyncIterator[None]:
        """Keep a shard while it is used."""
        self._inventory.retain(shard)
        try:
            yield
        finally:
            await self.release(shard)

    async def release(self, shard: Shard) -> None:
        """Release a retained shard and record this as the time of its last use."""
        self._store.touch(shard)
        self._inventory.release(shard)
        if not shard.leases:
            await self._store.remember_use(shard)

    async def _facts(self, shard: Shard, url: str) -> Facts | None:
        """Return the facts of a cached shard; None if it is damaged. Raises DiskError if the disk has failed."""
        with self._inventory.retained(shard):
            try:
                fresh = shard.facts is None
                facts = await self._store.facts(shard)
                if fresh:
                    await self._history.remember(facts)
            except CorruptShardError as exn:
                await self._health.examine()
                self._health.check(url)  # an unmounted disk proves nothing about its shards
                await self._quarantine.isolate(shard, exn)
                return None
            self._store.touch(shard)
            return facts

    async def _present(self, name: str, ref: ShardRef) -> Shard | None:
        """Return the shard if it is cached; if no version is given, the origin's last known one."""
        if ref.version is None:
            await self._revalidation.check(name, ref.url)
        return self._store.shards.get(self._aliases.key(name))
