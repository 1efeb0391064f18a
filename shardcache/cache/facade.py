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
from shardcache.cache.disk import Health, Quarantine, Reconciler
from shardcache.cache.fetcher import Fetcher, Ingester
from shardcache.cache.jobs import Loader
from shardcache.cache.leasing import Leasing
from shardcache.cache.loop_turns import Turns
from shardcache.cache.maintenance import Maintenance, Pinning
from shardcache.cache.manifests import Manifests, Resolved
from shardcache.cache.pins import Pins
from shardcache.cache.planner import Planner
from shardcache.cache.readers import Reader, Readers
from shardcache.cache.residency import Evictor, Inventory
from shardcache.cache.scrubbing import Scrubber
from shardcache.cache.transfers import Prefetcher, Transfers
from shardcache.cache.versions import History, Revalidation
from shardcache.cache.views import LiveView, Overview
from shardcache.cache.waits import Transfer
from shardcache.cache.warming import Send, Warming, reporting
from shardcache.config import Settings
from shardcache.errors import ShardcacheError
from shardcache.fetch.download import Downloader
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
        indexers: Indexers,
        group: asyncio.TaskGroup,
    ) -> None:
        counters, ttl_s, max_transfers = downloader.counters, settings.listing_ttl_s, settings.max_transfers
        self.layout, self.measures, self.turns = store.layout, counters.measures, Turns()
        self._store, self._downloader, self._allow = store, downloader, AllowList(settings.allow)
        history, planner = History(store.catalogue), Planner(store.shards)
        self._manifests = Manifests(origins, downloader, history, self._allow, self.turns, ttl_s)
        self._revalidation = Revalidation(store, origins, planner.aliases, counters, group, ttl_s)

        self._pins = Pins(store, self.turns, settings.max_pinned)
        inventory = Inventory(store, planner, self._pins)
        self._evictor = Evictor(inventory, counters)
        self._health = Health(store.folder, inventory.changed)
        quarantine = Quarantine(self._evictor, self._health)
        self._scrubber = Scrubber(quarantine, settings.scrub_rate, settings.scrub_pause_s)

        ingester = Ingester(self._evictor, history, indexers)
        fetcher = Fetcher(self._evictor, self._health, ingester, origins, downloader, settings.part_size)
        self._transfers = Transfers(
            fetcher.fetch, downloader.scheduler.deal, planner, inventory.changed, counters, group
        )
        prefetcher = Prefetcher(self._evictor, self._health, self._transfers, max_transfers)

        leasing = Leasing(self._transfers, quarantine, history, self._revalidation)
        self._readers = Readers(leasing, counters, self.turns, settings.plan_memory)

        self._maintenance = Maintenance(self._evictor, quarantine)
        self._warming = Warming(leasing, origins, downloader, indexers, max_transfers)
        self._pinning = Pinning(self._pins, self._warming)

        self._overview = Overview(self._readers, prefetcher, downloader, origins)
        self.live_view = LiveView(self._readers, self._overview.reason)
        background: dict[str, Callable[[], Awaitable[None]]] = {
            "prefetch": prefetcher.run,
            "catalogue": partial(history.rebuild, store),
            "health": partial(self._health.run, Reconciler(self._evictor)),
            "scrub": self._scrubber.run,
            "pins": self._pins.run,
            **{f"tier {tier.address}": tier.watch for tier in origins.tiers.values()},
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

    async def warm(self, patterns: Sequence[str], peer: Peer, send: Send) -> None:
        """Fetch every shard that the patterns match; events go to `send`. Raises CapacityError, OriginError."""
        async with self._found(patterns, peer, send) as refs:
            await self._warming.warm(refs, send)

    async def index(self, patterns: Sequence[str], peer: Peer, send: Send, member: TokenMember | None = None) -> None:
        """Count the samples of every shard that the patterns match, and the tokens in `member`, if given.

        Events go to `send`. Raises OriginError.
        """
        listed = not any(INDEX_SUFFIX in pattern for pattern in patterns)  # an index may be older than the shards
        async with self._found(patterns, peer, send, fresh=True) as refs:
            await self._warming.count(refs, send, listed=listed, member=member)

    @asynccontextmanager
    async def _found(
        self, patterns: Sequence[str], peer: Peer, send: Send, *, fresh: bool = False
    ) -> AsyncIterator[list[ShardRef]]:
        """Provide the shards that patterns match; report repeated requests for them, in the block as well."""
        async with reporting(patterns, self._downloader, send):
            refs = (await self._manifests.resolve(patterns, peer, fresh=fresh)).refs
        async with reporting({ref.url for ref in refs}, self._downloader, send):
            yield refs

    async def shards(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Yield the published shards under a url prefix that the user may see."""
        async for shard, facts in self._maintenance.shards(prefix, self.visible_to(peer)):
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
        return await self._maintenance.evict(patterns, self.visible_to(peer))

    async def pin(self, patterns: Sequence[str], peer: Peer, send: Send) -> None:
        """Pin and fetch every shard that the patterns match; events go to `send`.

        Raises CapacityError, DiskError, OriginError.
        """
        async with self._found(patterns, peer, send) as refs:
            await self._pinning.pin(refs, peer, send)

    async def unpin(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the user's pins on matching shards; a trusted user removes everyone's. Raises DiskError."""
        return await self._pinning.unpin(patterns, peer, self.visible_to(peer))

    def pins(self, peer: Peer) -> AsyncIterator[Json]:
        """Yield the pins on urls that the user may see."""
        return self._pinning.rows(self.visible_to(peer))

    def verify(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Verify every shard under a url prefix by reading it again; yield events."""
        return self._maintenance.verify(prefix, self.visible_to(peer))

    # State

    def visible_to(self, peer: Peer) -> Callable[[str], bool]:
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
        own = {"disk": self._disk(), "scrub": self._scrubber.to_json(), "pins": self._pins.to_json()}
        return self._overview.page(self.visible_to(peer)) | own

    def health(self) -> Json:
        """Return `status` (`ok` or `degraded`) and the state of the disk; degraded, only cached shards are served."""
        well = self._health.error is None and not self._evictor.short_bytes
        return {"status": "ok" if well else "degraded", "disk": self._disk()}

    def _disk(self) -> Json:
        space = self._store.space
        return self._health.to_json() | {"short_bytes": space.capacity_bytes - space.effective_bytes()}


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
