"""Leases: turn a planned shard into a published file that stays while it is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.catalog.history import History
from shardcache.cache.catalog.revalidation import Revalidation
from shardcache.cache.planner import Planner
from shardcache.cache.residency.disk_health import Health
from shardcache.cache.residency.evictor import Evictor
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.transfers.arriving import Arrival
from shardcache.cache.transfers.transfers import Class, Transfers
from shardcache.cache.transfers.waiting import Wait
from shardcache.errors import CorruptShardError, DiskError
from shardcache.metrics import Counters
from shardcache.protocol import ShardRef
from shardcache.store.folder.layout import shard_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store

log = structlog.get_logger()

# Urls looked up at a time: larger batches would block the event loop.
_RECALLED = 1_000


@dataclass(frozen=True, slots=True)
class Published:
    """A cached shard, held for the caller. `hit`: it did not have to be fetched."""

    shard: Shard
    facts: Facts
    hit: bool


class Leasing:
    """Grants and ends leases."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        evictor: Evictor,
        inventory: Inventory,
        planner: Planner,
        aliases: AliasTable,
        history: History,
        revalidation: Revalidation,
        counters: Counters,
        health: Health,
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._evictor = evictor
        self._inventory = inventory
        self._planner = planner
        self._aliases = aliases
        self._history = history
        self._revalidation = revalidation
        self._counters = counters
        self._health = health

    async def recall(self, refs: Iterable[ShardRef]) -> None:
        """Restore the versions of bare urls cached before the last restart; `acquire` revalidates them."""
        unknown = [ref.url for ref in refs if ref.version is None and self._aliases.key(ref.url) == ref.url]
        for first in range(0, len(unknown), _RECALLED):
            urls = unknown[first : first + _RECALLED]
            for url, version in zip(urls, await self._history.versions(urls), strict=True):
                if version is not None and shard_key(url, version) in self._store.shards:
                    self._aliases.learn(url, shard_key(url, version), now_s=float("-inf"))

    async def acquire(self, ref: ShardRef, wanted: Class, wait: Wait) -> Published | Arrival:
        """Return the published shard, held, or early access to it if `wait` accepts that; fetch it if it is missing.

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
            elif facts := await self._held(shard, ref.url):
                if hit:
                    self._planner.now.found(shard.key)
                return Published(shard, facts, hit)
            else:
                shard, hit = None, False

    async def release(self, shard: Shard) -> None:
        """Drop a hold and record its end as the shard's last use."""
        self._store.touch(shard)
        self._inventory.drop(shard)
        if not shard.leases:
            await self._store.remember_use(shard)

    async def quarantine(self, shard: Shard, exn: CorruptShardError) -> None:
        """Take a damaged shard out of service; the next request re-fetches it."""
        if self._store.shards.get(shard.key) is not shard:
            return  # evicted or quarantined, and perhaps re-fetched, during the check
        log.error("cached shard is damaged; quarantined", shard=exn.url, cause=exn.message)
        self._counters.corrupt += 1
        self._evictor.forget(shard.key)
        try:
            await self._store.quarantine(shard)
        except DiskError as failure:  # it is out of service in any case
            log.warning("cannot move the damaged shard to quarantine yet", shard=exn.url, cause=failure.message)
        self._evictor.changed.notify()

    async def _held(self, shard: Shard, url: str) -> Facts | None:
        """Hold a cached shard and return its facts; None if it is damaged. Raises DiskError if the disk has failed."""
        self._inventory.take(shard)
        held = False
        try:
            fresh = shard.facts is None
            facts = await self._store.facts(shard)
            if fresh:
                await self._history.remember(facts)
            self._store.touch(shard)
            held = True
            return facts
        except CorruptShardError as exn:
            await self._health.examine()
            self._health.check(url)  # an unmounted disk proves nothing about its shards
            await self.quarantine(shard, exn)
            return None
        finally:
            if not held:  # failed, or cancelled with the reader's request
                self._inventory.drop(shard)

    async def _present(self, name: str, ref: ShardRef) -> Shard | None:
        """Return the shard if it is cached; if no version is given, the origin's last known one."""
        if ref.version is None:
            await self._revalidation.check(name, ref.url)
        return self._store.shards.get(self._aliases.key(name))
