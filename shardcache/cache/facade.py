"""The whole cache behind one class, `Cache`, for the server and the composition root."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from shardcache.access import AllowList, Peer, canonical
from shardcache.cache.disk import Health, Scrubber
from shardcache.cache.fetcher import Fetcher
from shardcache.cache.manifests import Manifests, matcher
from shardcache.cache.pins import Pin, Pins, pinned_by
from shardcache.cache.planner import History, Planner, Revalidation
from shardcache.cache.readers import Readers
from shardcache.cache.residency import Residency
from shardcache.cache.transfers import Leasing, Prefetcher, Published, Transfers
from shardcache.cache.views import Overview
from shardcache.cache.waits import Turns
from shardcache.cache.warming import Round, Send, Warming, reporting
from shardcache.config import Settings
from shardcache.errors import CorruptShardError, ExhaustedError, ShardcacheError
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.protocol import Json, ShardRef, Wanted
from shardcache.redact import redact
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.keys import shard_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store
from shardcache.tarindex.contents import TokenMember
from shardcache.url_names import INDEX_SUFFIX

log = structlog.get_logger()

_AGAIN_S = 1.0
_AT_ONCE = 256  # shards or pins: a hundred thousand would block the event loop


class Cache:
    """One node's open cache: what reading needs, and what users ask for. Its tasks run in `group` until `stop`."""

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
        self.layout, self.bills, self.measures, self.turns = store.layout, counters.bills, counters.measures, Turns()
        self._store, self._downloader, self._allow = store, downloader, AllowList(settings.allow)
        history, planner = History(store), Planner(store.shards)
        self.manifests = Manifests(origins, downloader, history, self._allow, ttl_s, settings.plan_memory // 2)
        self._pins = Pins(store, self.turns, settings.max_pinned)
        self._residency = Residency(store, planner, self._pins, counters)
        self._health = Health(self._residency)
        self._scrubber = Scrubber(self._health, settings.scrub_rate, settings.scrub_pause_s)

        fetcher = Fetcher(self._health, origins, downloader, history, indexers, settings.part_size)
        self._transfers = Transfers(fetcher.fetch, downloader.scheduler.deal, self._residency, group)
        prefetcher = Prefetcher(self._health, self._transfers, max_transfers)
        self._revalidation = Revalidation(store, origins, planner, counters, group, ttl_s)
        leasing = Leasing(self._transfers, self._health, history, self._revalidation)
        self.readers = Readers(leasing, self.turns, settings.plan_memory)
        self._warming = Warming(leasing, origins, downloader, indexers, max_transfers)
        self.overview = Overview(self.readers, prefetcher, downloader, origins)

        background: dict[str, Callable[[], Awaitable[None]]] = {
            "prefetch": prefetcher.run,
            "catalogue": history.rebuild,
            "health": self._health.run,
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

    def visible_to(self, peer: Peer) -> Callable[[str], bool]:
        """Return a predicate: may the user see this url?"""
        return lambda url: self._allow.shows(url, peer)

    # Shards that users name. Events go to `send`; an exception from it aborts the request.

    async def warm(self, patterns: Sequence[str], peer: Peer, send: Send) -> None:
        """Fetch every shard or file that the patterns match. Raises CapacityError, OriginError."""
        async with self._found(patterns, peer, send, "either") as refs:
            await self._warming.warm(refs, send)

    async def index(self, patterns: Sequence[str], peer: Peer, send: Send, member: TokenMember | None = None) -> None:
        """Count the samples, and tokens in `member` if given, of every matching shard. Raises OriginError."""
        listed = not any(INDEX_SUFFIX in pattern for pattern in patterns)  # an index may be older than the shards
        async with self._found(patterns, peer, send, "samples", fresh=True) as refs:
            await self._warming.count(refs, send, listed=listed, member=member)

    @asynccontextmanager
    async def _found(
        self, patterns: Sequence[str], peer: Peer, send: Send, wanted: Wanted, *, fresh: bool = False
    ) -> AsyncIterator[Sequence[ShardRef]]:
        """Provide the shards and files that patterns match; report repeated requests for them, in the block as well."""
        async with reporting(patterns, self._downloader, send):
            max_age_s = 0 if fresh else math.inf
            listing = await self.manifests.resolve(patterns, peer, max_age_s=max_age_s, wanted=wanted)
        async with reporting(frozenset(listing.shards.urls), self._downloader, send):
            yield await asyncio.to_thread(lambda: listing.wanting(wanted).refs())

    async def pin(self, patterns: Sequence[str], peer: Peer, send: Send) -> None:
        """Pin every shard or file that the patterns match, and fetch the missing ones.

        Shards that cannot be fetched are not pinned, unless they were before. If `send` raises, all pins remain, and
        each applies when its shard arrives. Raises CapacityError, DiskError, OriginError.
        """
        uids = frozenset({peer.uid})

        async def keep(found: Published) -> None:
            """Pin a shard that has arrived. Raises CapacityError if an unexpected size exceeds the pin limit."""
            pin = self._pins.get(found.facts.url)
            if pin is None or peer.uid not in pin.uids:  # the origin had not given its version and size
                await self._pins.add([Pin(found.facts.url, found.shard.key, found.shard.kept_bytes, uids)])
            self._pins.arrived(found.shard)

        async with self._found(patterns, peer, send, "either") as refs:
            asked = await self._warming.ask(refs, versions=True)
            new = await self._pins.add(await asyncio.to_thread(_pins_of, asked, uids))
            totals = await self._warming.fetch(Round(asked, "cached", self._transfers, send), keep)
            pins = [pin for url in new if (pin := self._pins.get(url)) is not None]
            await self._pins.remove([pin for pin in pins if pin.key not in self._store.shards], peer.uid)
            await self._pins.save()
            await send({"event": "done", **totals, "pins": self._pins.to_json()})

    async def unpin(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the user's pins on matching shards, a trusted user everyone's.

        Raises DiskError; ConfigError for a pattern of an unknown protocol.
        """
        await Origins.check_protocols(patterns)
        matches = await asyncio.to_thread(matcher, patterns)
        pins = [pin async for pin in self._visible_pins(peer) if matches(pin.url)]
        left = await self._pins.remove(pins, None if peer.is_trusted else peer.uid)
        return {
            "unpinned": [url for url, pin in left.items() if pin is None],
            "kept": [{"url": url, "reason": pinned_by(pin)} for url, pin in left.items() if pin is not None],
        }

    async def pins(self, peer: Peer) -> AsyncIterator[Json]:
        """Yield the pins on urls that the user may see."""
        async for pin in self._visible_pins(peer):
            is_cached = pin.key in self._store.shards
            yield {"url": pin.url, "size_bytes": pin.size_bytes, "cached": is_cached, "uids": sorted(pin.uids)}

    async def _visible_pins(self, peer: Peer) -> AsyncIterator[Pin]:
        visible = self.visible_to(peer)
        for number, pin in enumerate(self._pins):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if visible(pin.url):
                yield pin

    # Published shards

    async def shards(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Yield the published shards under a url prefix that the user may see.

        Raises ConfigError for a prefix of an unknown protocol.
        """
        await Origins.check_protocols([prefix])
        async for shard, facts in self._shards(self._under(prefix, peer)):
            yield {
                "url": facts.url,
                "version": facts.version,
                "size_bytes": facts.size_bytes,
                "samples": facts.samples,
                "leases": shard.leases,
                "pinned": shard.pinned,
                "used_at_s": shard.used_at_s,
            }

    def _under(self, prefix: str, peer: Peer) -> Callable[[str], bool]:
        visible = self.visible_to(peer)
        is_whole = "://" in prefix or prefix.startswith("/")
        wanted = canonical(prefix) if is_whole else prefix  # which may end within the scheme
        return lambda url: canonical(url).startswith(wanted) and visible(url)

    async def _shards(self, is_meant: Callable[[str], bool]) -> AsyncGenerator[tuple[Shard, Facts], None]:
        """Yield the published shards whose url is meant; quarantine damaged ones on the way."""
        for number, shard in enumerate(list(self._store.shards.values())):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if shard.facts is not None and not is_meant(shard.facts.url):
                continue  # without reading its sidecar
            try:
                facts = await self._store.facts(shard)
            except CorruptShardError as exn:
                await self._health.found(shard, exn)
                continue
            if is_meant(facts.url) and self._store.shards.get(shard.key) is shard:
                yield shard, facts

    async def named_path(self, shard: Shard, facts: Facts) -> Path:
        """Return a path of a leased shard that ends with its object's name, for libraries that go by it."""
        return await self._store.named_path(shard, facts)

    async def evict(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the matching shards that the user may see; report those that stayed and why.

        Raises ConfigError for a pattern of an unknown protocol.
        """
        await Origins.check_protocols(patterns)
        matches, visible = await asyncio.to_thread(matcher, patterns), self.visible_to(peer)
        evicted: list[str] = []
        kept: list[Json] = []
        freed_bytes = 0
        async for shard, facts in self._shards(lambda url: matches(url) and visible(url)):
            if shard.stays:
                pin = self._pins.get(facts.url) if shard.pinned else None
                reason = f"in use by {shard.leases} reader(s)" if pin is None else pinned_by(pin)
                kept.append({"url": facts.url, "reason": reason})
            elif await self._residency.evict(shard):
                evicted.append(facts.url)
                freed_bytes += shard.kept_bytes
            else:
                kept.append({"url": facts.url, "reason": "a process still has it open, or a hard link to it exists"})
        return {"evicted": evicted, "kept": kept, "freed_bytes": freed_bytes}

    async def verify(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Verify every shard under a url prefix: read it again, quarantine damaged ones; yield events.

        The last event also counts the shards that were refused when they last arrived, and thus are
        not cached. Raises ConfigError for a prefix of an unknown protocol.
        """
        await Origins.check_protocols([prefix])
        shards = [found async for found in self._shards(self._under(prefix, peer))]
        total_bytes = sum(shard.size_bytes for shard, _ in shards)
        yield {"event": "start", "shards": len(shards), "total_bytes": total_bytes}
        done_bytes = corrupt = 0
        for number, (shard, facts) in enumerate(shards, 1):
            error = await self._verify(shard)
            corrupt += isinstance(error, CorruptShardError)
            done_bytes += shard.size_bytes
            result = {"ok": True} if error is None else {"ok": False, "error": error.to_json()}
            yield {"event": "shard", "url": facts.url, **result}
            done = {"done_shards": number, "shards": len(shards)}
            yield {"event": "progress", **done, "done_bytes": done_bytes, "total_bytes": total_bytes}
        refused = len(self.overview.refused(self._under(prefix, peer)))
        yield {"event": "done", "shards": len(shards), "corrupt": corrupt, "refused": refused, "bytes": done_bytes}

    async def _verify(self, shard: Shard) -> CorruptShardError | ExhaustedError | None:
        if self._store.shards.get(shard.key) is not shard:
            return None  # evicted since it was listed
        try:
            with self._residency.retained(shard):
                await self._store.check(shard)
        except (CorruptShardError, ExhaustedError) as exn:
            if isinstance(exn, CorruptShardError):
                await self._health.found(shard, exn)
            return exn
        return None

    # State

    def status(self, peer: Peer) -> Json:
        """Return the contents and current activity of the cache."""
        own = {"disk": self._disk(), "scrub": self._scrubber.to_json(), "pins": self._pins.to_json()}
        return self.overview.page(self.visible_to(peer)) | own

    async def lost(self) -> None:
        """Return once the cache folder was found deleted with the folder around it."""
        await self._health.lost()

    def health(self) -> Json:
        """Return `status` (`ok` or `degraded`) and the state of the disk; degraded, only cached shards are served."""
        well = self._health.error is None and not self._residency.short_bytes
        return {"status": "ok" if well else "degraded", "disk": self._disk()}

    def _disk(self) -> Json:
        space = self._store.space
        return self._health.to_json() | {"short_bytes": space.capacity_bytes - space.effective_bytes()}


def _pins_of(refs: Sequence[ShardRef], uids: frozenset[int]) -> list[Pin]:
    """Return a pin for each shard of known version and size; its footprint is an estimate until it arrives."""
    return [
        Pin(redact(ref.url), shard_key(ref.url, ref.version), footprint_bytes(ref.size_bytes), uids)
        for ref in refs
        if ref.version is not None and ref.size_bytes is not None
    ]


async def _enduring(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a background task, again after an error: a lack of descriptors or threads must not end the daemon."""
    while True:
        try:
            return await run()
        except (OSError, RuntimeError, ShardcacheError) as exn:
            log.error("background task failed; running it again", task=name, cause=str(exn))
        except Exception:  # a top-level guard, as of transfers and sessions
            log.exception("unexpected error in a background task; running it again", task=name)
        await asyncio.sleep(_AGAIN_S)
