"""`Cache`: everything that server and composition root need of the cache, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from shardcache.cache.allow import AllowList
from shardcache.cache.counting import Counting
from shardcache.cache.fetching import Fetcher
from shardcache.cache.holds import Holds
from shardcache.cache.ingesting import Ingester
from shardcache.cache.known import Known
from shardcache.cache.leasing import Leasing
from shardcache.cache.manifests import Manifests
from shardcache.cache.names import Names
from shardcache.cache.overview import Overview
from shardcache.cache.pages import Pages
from shardcache.cache.planner import Planner
from shardcache.cache.prefetch import Prefetcher
from shardcache.cache.readers import Reader, Readers
from shardcache.cache.room import Room
from shardcache.cache.rounds import Tell
from shardcache.cache.signal import Signal
from shardcache.cache.transfers import Transfer, Transfers
from shardcache.cache.upkeep import Upkeep
from shardcache.cache.warming import Warming
from shardcache.config import Settings
from shardcache.fetch.download import Downloader
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.origin.urls import INDEX_SUFFIX
from shardcache.protocol import ShardRef
from shardcache.store.indexers import Indexers
from shardcache.store.store import Store

Json = dict[str, Any]


class Cache:
    """The cache of one node while it is open. Its tasks run in `group` until `stop`."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        origins: Origins,
        downloader: Downloader,
        counters: Counters,
        indexers: Indexers,
        group: asyncio.TaskGroup,
    ) -> None:
        names, changed, known = Names(), Signal(), Known(store.catalogue)
        planner = Planner(names)
        pages = Pages(store, planner, names, changed)
        holds = Holds(store, planner, pages, changed)
        room = Room(store, planner, pages, names, counters, changed)
        ingester = Ingester(store, room, known, indexers)
        fetcher = Fetcher(
            store, origins, downloader, room, holds, planner, names, counters, ingester, settings.part_size
        )
        transfers = Transfers(fetcher.fetch, downloader.reconsider, planner, changed, group)
        leasing = Leasing(
            store, transfers, room, holds, planner, names, known, origins, counters, settings.listing_ttl_s
        )
        readers = Readers(planner, leasing, holds, transfers, counters, changed)
        prefetcher = Prefetcher(planner, readers.ref, names, store, room, transfers, changed, settings.max_transfers)
        self._watching = [
            group.create_task(prefetcher.run(), name="prefetch"),
            group.create_task(pages.run(), name="pages"),
        ]
        self.layout = store.layout
        self._allow = AllowList(settings.allow)
        self._manifests = Manifests(origins, downloader, store.catalogue, known, self._allow, settings.listing_ttl_s)
        self._readers = readers
        self._store = store
        self._transfers = transfers
        self._overview = Overview(store, planner, names, transfers, readers, prefetcher, downloader, counters)
        self._upkeep = Upkeep(store, room, holds, leasing)
        self._warming = Warming(store, transfers, leasing, origins, downloader, settings.max_transfers)
        self._counting = Counting(store, transfers, leasing, known, origins, downloader, settings.max_transfers)

    def __repr__(self) -> str:
        return f"Cache({self._store!r}, transfers={len(self._transfers.all())})"

    def stop(self) -> None:
        """Drop transfers under way, their finished parts stay for the next start; fetch nothing ahead any more."""
        for task in self._watching:
            task.cancel()
        self._transfers.stop()

    # Reading

    async def resolve(self, patterns: Sequence[str], uid: int) -> list[ShardRef]:
        """Return the shards that a user's patterns name. Raises OriginError of every kind."""
        return await self._manifests.resolve(patterns, uid)

    def join(self, job: str, uid: int) -> Reader:
        """Return the state of a newly connected reader."""
        return self._readers.add(job, uid)

    def check_allowed(self, refs: Sequence[ShardRef], uid: int) -> None:
        """Raise NotAllowedError unless the user may have all of these fetched."""
        for ref in refs:
            self._allow.check(ref.url, uid)

    # Upkeep

    async def warm(self, patterns: Sequence[str], uid: int, tell: Tell) -> None:
        """Fetch all that the patterns name, telling events. Raises CapacityError and OriginError."""
        await self._warming.warm(await self.resolve(patterns, uid), tell)

    async def index(self, patterns: Sequence[str], uid: int, tell: Tell) -> None:
        """Count the samples of all that the patterns name, telling events. Raises OriginError."""
        listed = not any(INDEX_SUFFIX in pattern for pattern in patterns)  # an index may be older than the shards
        refs = await self._manifests.resolve(patterns, uid, fresh=True)
        await self._counting.count(refs, tell, listed=listed)

    async def shards(self, prefix: str) -> AsyncIterator[Json]:
        """Yield what is published below a url prefix."""
        async for shard, facts in self._upkeep.shards(prefix):
            yield {
                "url": facts.url,
                "version": facts.version,
                "size_bytes": facts.size_bytes,
                "samples": facts.samples,
                "leases": shard.leases,
                "used_at_s": shard.used_at_s,
            }

    async def evict(self, patterns: Sequence[str]) -> Json:
        """Remove what matches, where nobody reads it."""
        return await self._upkeep.evict(patterns)

    def verify(self, prefix: str) -> AsyncIterator[Json]:
        """Read every shard below a url prefix again, yielding events."""
        return self._upkeep.verify(prefix)

    def reason(self, transfer: Transfer) -> str:
        """Return why a transfer is not done yet, in words for people."""
        return self._overview.reason(transfer)

    def status(self) -> Json:
        """Return what the cache holds and does now."""
        return self._overview.page()
