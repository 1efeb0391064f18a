"""The whole cache behind one class, `Cache`, for the server and the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog

from shardcache.access.rules import AllowList, Peer
from shardcache.access.urls import INDEX_SUFFIX
from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.catalog.history import History
from shardcache.cache.catalog.manifests import Manifests, Resolved
from shardcache.cache.catalog.revalidation import Revalidation
from shardcache.cache.loop_turns import Turns
from shardcache.cache.observer import Observer
from shardcache.cache.operations.operations import Operations
from shardcache.cache.operations.rounds import Tell, reporting
from shardcache.cache.planner import Planner
from shardcache.cache.readers.jobs import Loader
from shardcache.cache.readers.leasing import Leasing
from shardcache.cache.readers.readers import Reader, Readers
from shardcache.cache.residency.residency import Residency
from shardcache.cache.transfers.fetcher import Fetcher
from shardcache.cache.transfers.prefetch import Prefetcher
from shardcache.cache.transfers.transfers import Transfer, Transfers
from shardcache.cache.views.live import LiveView
from shardcache.cache.views.overview import Overview
from shardcache.config import Settings
from shardcache.errors import ShardcacheError
from shardcache.fetch.download import Downloader
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.store.indexers import Indexers
from shardcache.store.store import Store
from shardcache.tarindex import TokenMember

Json = dict[str, Any]

log = structlog.get_logger()

_AGAIN_S = 1.0


class Cache:
    """One node's open cache. Its tasks run in `group` until `stop`."""

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
        aliases, history = AliasTable(store.shards), History(store.catalogue)
        planner, turns = Planner(aliases), Turns()
        residency = Residency(settings, store, planner, aliases, history, indexers, counters, turns)
        evictor, inventory, changed = residency.evictor, residency.inventory, residency.changed
        fetcher = Fetcher(
            store,
            origins,
            downloader,
            evictor,
            inventory,
            planner,
            aliases,
            counters,
            residency.ingester,
            residency.health,
            settings.part_size,
        )
        observer = Observer(counters)
        transfers = Transfers(fetcher.fetch, downloader.reconsider, planner, changed, group, observer.transferred)
        prefetcher = Prefetcher(planner, aliases, store, evictor, transfers, changed, settings.max_transfers)
        revalidation = Revalidation(store, origins, aliases, counters, group, settings.listing_ttl_s)
        health, quarantine = residency.health, residency.quarantine
        leasing = Leasing(store, transfers, inventory, planner, aliases, history, revalidation, health, quarantine)
        readers = Readers(
            planner, leasing, inventory, transfers, counters, changed, turns, observer.waited, settings.plan_memory
        )
        self._allow, self._downloader = AllowList(settings.allow), downloader
        self._manifests = Manifests(
            origins, downloader, store.catalogue, history, self._allow, turns, settings.listing_ttl_s
        )
        self._operations = Operations(
            settings,
            store,
            origins,
            downloader,
            residency,
            transfers,
            leasing,
            history,
            indexers,
        )
        tiers = list(origins.tiers.values())
        self._overview = Overview(store, planner, aliases, transfers, readers, prefetcher, downloader, tiers, counters)
        self.live_view = LiveView(store, planner, aliases, transfers, readers, turns, self._overview.reason)
        self.layout, self.measures, self.turns = store.layout, counters.measures, turns
        self._store, self._residency, self._readers = store, residency, readers
        self._transfers, self._revalidation = transfers, revalidation
        background: dict[str, Callable[[], Awaitable[None]]] = {
            "prefetch": prefetcher.run,
            "catalogue": partial(history.rebuild, store),
            **{f"tier {tier.address}": tier.watch for tier in tiers},
            **residency.background(fetcher.is_under_way),
        }
        self._tasks = [group.create_task(_enduring(name, run), name=name) for name, run in background.items()]

    def __repr__(self) -> str:
        return f"Cache({self._store!r}, transfers={len(self._transfers.all())})"

    def stop(self) -> None:
        """Cancel transfers and background tasks, prefetching included; finished parts stay for the next start."""
        for task in self._tasks:
            task.cancel()
        self._transfers.stop()
        self._revalidation.stop()

    # Reading

    async def resolve(self, patterns: Sequence[str], peer: Peer) -> Resolved:
        """Return the shards that a user's patterns match. Raises any OriginError."""
        return await self._manifests.resolve(patterns, peer)

    def join(self, job: str, uid: int, loader: Loader | None = None) -> Reader:
        """Register a newly connected reader and return it."""
        return self._readers.add(job, uid, loader)

    async def check_allowed(self, refs: Sequence[ShardRef], peer: Peer) -> None:
        """Raise NotAllowedError unless the user is allowed to have all of these shards fetched."""
        await self.turns.take(refs, lambda some: self._allow.check_all((ref.url for ref in some), peer))

    # Maintenance

    async def warm(self, patterns: Sequence[str], peer: Peer, tell: Tell) -> None:
        """Fetch every shard that the patterns match, reporting events to `tell`. Raises CapacityError, OriginError."""
        async with self._found(patterns, peer, tell) as refs:
            await self._operations.warming.warm(refs, tell)

    async def index(self, patterns: Sequence[str], peer: Peer, tell: Tell, member: TokenMember | None = None) -> None:
        """Count the samples of every shard that the patterns match, and the tokens in `member`, if given.

        Reports events to `tell`. Raises OriginError.
        """
        listed = not any(INDEX_SUFFIX in pattern for pattern in patterns)  # an index may be older than the shards
        async with self._found(patterns, peer, tell, fresh=True) as refs:
            await self._operations.counting.count(refs, tell, listed=listed, member=member)

    @asynccontextmanager
    async def _found(
        self, patterns: Sequence[str], peer: Peer, tell: Tell, *, fresh: bool = False
    ) -> AsyncIterator[list[ShardRef]]:
        """Provide the shards that patterns match; report repeated requests for them, in the block as well."""
        async with reporting(patterns, self._downloader, tell):
            refs = (await self._manifests.resolve(patterns, peer, fresh=fresh)).refs
        async with reporting({ref.url for ref in refs}, self._downloader, tell):
            yield refs

    async def shards(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Yield the published shards under a url prefix that the user may see."""
        async for shard, facts in self._operations.maintenance.shards(prefix, self.sight(peer)):
            yield {
                "url": facts.url,
                "version": facts.version,
                "size_bytes": facts.size_bytes,
                "samples": facts.samples,
                "leases": shard.leases,
                "pinned": shard.pinned,
                "used_at_s": shard.used_at_s,
            }

    async def evict(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the matching shards that the user may see, except those leased or pinned."""
        return await self._operations.maintenance.evict(patterns, self.sight(peer))

    async def pin(self, patterns: Sequence[str], peer: Peer, tell: Tell) -> None:
        """Pin and fetch every shard that the patterns match, reporting events to `tell`.

        Raises CapacityError, DiskError, OriginError.
        """
        async with self._found(patterns, peer, tell) as refs:
            await self._operations.pinning.pin(refs, peer, tell)

    async def unpin(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the user's pins on matching shards; a trusted user removes everyone's. Raises DiskError."""
        return await self._operations.pinning.unpin(patterns, peer, self.sight(peer))

    def pins(self, peer: Peer) -> AsyncIterator[Json]:
        """Yield the pins on urls that the user may see."""
        return self._operations.pinning.rows(self.sight(peer))

    def verify(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Verify every shard under a url prefix by reading it again; yield events."""
        return self._operations.maintenance.verify(prefix, self.sight(peer))

    def sight(self, peer: Peer) -> Callable[[str], bool]:
        """Return a predicate: may the user see this url?"""
        return lambda url: self._allow.shows(url, peer)

    def reason(self, transfer: Transfer) -> str:
        """Return a human-readable reason why a transfer has not finished yet."""
        return self._overview.reason(transfer)

    def listing_reason(self, patterns: Sequence[str]) -> str:
        """Return a human-readable reason why patterns are not resolved yet."""
        failed = next(filter(None, map(self._downloader.failing.get, patterns)), None)
        return f"listing the shards; {failed}" if failed else "listing the shards"

    def status(self, peer: Peer) -> Json:
        """Return the contents and current activity of the cache."""
        own = {
            "disk": self._disk(),
            "scrub": self._residency.scrubber.to_json(),
            "pins": self._residency.pins.to_json(),
        }
        return self._overview.page(self.sight(peer)) | own

    def health(self) -> Json:
        """Return `status` (`ok` or `degraded`) and the state of the disk; degraded, only cached shards are served."""
        well = self._residency.health.error is None and not self._residency.evictor.short_bytes
        return {"status": "ok" if well else "degraded", "disk": self._disk()}

    def _disk(self) -> Json:
        space = self._store.space
        short_bytes = space.capacity_bytes - space.effective_bytes()
        return self._residency.health.to_json() | {"short_bytes": short_bytes}


async def _enduring(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a background task, and run it again after an error of the process, the system or the disk.

    Without it, a lack of descriptors or threads (a RuntimeError) would end the daemon.
    """
    while True:
        try:
            return await run()
        except (OSError, RuntimeError, ShardcacheError) as exn:
            log.error("background task failed; running it again", task=name, cause=str(exn))
            await asyncio.sleep(_AGAIN_S)
