"""The whole cache behind one class, `Cache`, for the server and the composition root."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from shardcache.access.rules import Peer
from shardcache.access.urls import canonical
from shardcache.cache.assembly import (
    Given,
    assemble_fetching,
    assemble_kept,
    assemble_uses,
    assemble_views,
)
from shardcache.cache.background import BackgroundTasks
from shardcache.cache.bulk.round import Round, Send, reporting
from shardcache.cache.bulk.warming import CACHED
from shardcache.cache.fetching.leasing import Published
from shardcache.cache.fetching.prefetcher import Prefetcher
from shardcache.cache.listings.matching import matcher
from shardcache.cache.space.pins import pinned_by
from shardcache.cache.versions.history import History
from shardcache.config.settings import Settings
from shardcache.errors import CacheError, CorruptShardError, ExhaustedError
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.shared.protocol import Json, ShardRef, Wanted
from shardcache.shared.urls.url_names import may_name_index
from shardcache.store.folder.pins_file import Pin
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.keys import place_of, shard_key, stored_url
from shardcache.store.part_file import PartFile
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store
from shardcache.tarindex.contents import TokenMember

_AT_ONCE = 256  # shards or pins looked at before other tasks get a turn: there may be many


class Cache:
    """One node's open cache: what reading needs, and what users ask for.

    Its tasks run in `group` until `stop`.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        origins: Origins,
        downloader: Downloader,
        indexers: Indexers,
        group: asyncio.TaskGroup,
    ) -> None:
        given = Given(settings, store, origins, downloader, indexers, group)
        kept = assemble_kept(given)
        fetching = assemble_fetching(given, kept)
        uses = assemble_uses(given, kept, fetching)
        views = assemble_views(given, kept, fetching, uses.readers)
        self.layout = store.layout
        self.handed = origins.handed
        self.counters = downloader.counters
        self.bills = downloader.counters.bills
        self.measures = downloader.counters.measures
        self.turns = kept.turns
        self.manifests = kept.manifests
        self.readers = uses.readers
        self.objects = uses.objects
        self.reasons = views.reasons
        self.live_view = views.live_view
        self._store = store
        self._downloader = downloader
        self._allow = kept.allow
        self._revalidation = kept.revalidation
        self._pins = kept.pins
        self._residency = kept.residency
        self._health = kept.health
        self._scrubber = kept.scrubber
        self._transfers = fetching.transfers
        self._warming = uses.warming
        self._counting = uses.counting
        self._status_page = views.status_page
        self._background = BackgroundTasks(group)
        self._start(kept.history, fetching.prefetcher, origins)

    def _start(self, history: History, prefetcher: Prefetcher, origins: Origins) -> None:
        """Start what runs in the background."""
        self._background.start("prefetch", prefetcher.run)
        self._background.start("catalogue", history.rebuild)
        self._background.start("health", self._health.run)
        self._background.start("scrub", self._scrubber.run)
        self._background.start("pins", self._pins.run)
        for tier in origins.tiers.values():
            self._background.start(f"tier {tier.address}", tier.watch)

    def __repr__(self) -> str:
        return f"Cache({self._store!r}, transfers={len(self._transfers.all())})"

    def stop(self) -> None:
        """Cancel transfers and background tasks, prefetching included.

        Finished parts stay for the next start.
        """
        self._background.stop()
        self._transfers.stop()
        self._revalidation.stop()

    def visible_to(self, peer: Peer) -> Callable[[str], bool]:
        """Return a predicate: may the user see this url?"""
        return lambda url: self._allow.shows(url, peer)

    # Shards that users name. Events go to `send`; an exception from it aborts the request.

    async def warm(
        self,
        patterns: Sequence[str],
        peer: Peer,
        send: Send,
        wanted: Wanted = "shards",
    ) -> None:
        """Fetch every shard or file that the patterns match.

        With "files" `wanted`, the own bytes of all objects. Raises CapacityError, OriginError.
        """
        async with self._found(patterns, peer, send, wanted) as refs:
            await self._warming.warm(refs, send)

    async def index(
        self,
        patterns: Sequence[str],
        peer: Peer,
        send: Send,
        member: TokenMember | None = None,
    ) -> None:
        """Count the samples, and tokens in `member` if given, of every matching shard.

        Raises OriginError.
        """
        # An index file may be older than the shards that it lists.
        is_listed = not any(map(may_name_index, patterns))
        async with self._found(patterns, peer, send, "samples", max_age_s=0) as refs:
            await self._counting.count(refs, send, listed=is_listed, member=member)

    @asynccontextmanager
    async def _found(
        self,
        patterns: Sequence[str],
        peer: Peer,
        send: Send,
        wanted: Wanted,
        *,
        max_age_s: float = math.inf,
    ) -> AsyncIterator[Sequence[ShardRef]]:
        """Provide the shards and files that patterns match.

        Repeated requests for them are reported, in the block as well.
        """
        async with reporting(patterns, self._downloader, send):
            listing = await self.manifests.resolve(
                patterns,
                peer,
                max_age_s=max_age_s,
                wanted=wanted,
            )
        async with reporting(frozenset(listing.shards.urls), self._downloader, send):
            yield await asyncio.to_thread(lambda: listing.wanting(wanted).refs())

    async def pin(self, patterns: Sequence[str], peer: Peer, send: Send) -> None:
        """Pin every shard or file that the patterns match, and fetch the missing ones.

        Shards that cannot be fetched are not pinned, unless they were before. If `send` raises, all
        pins remain, and each applies when its shard arrives. Raises CapacityError, DiskError,
        OriginError.
        """
        uids = frozenset({peer.uid})

        async def keep(found: Published) -> None:
            """Pin a shard that has arrived.

            Raises CapacityError if an unexpected size exceeds the pin limit.
            """
            pin = self._pins.get(found.facts.url)
            if pin is None or peer.uid not in pin.uids:
                # The origin had not given its version and size.
                shard = found.shard
                await self._pins.add([Pin(found.facts.url, shard.key, shard.kept_bytes, uids)])
            self._pins.arrived(found.shard)

        async with self._found(patterns, peer, send, "shards") as refs:
            asked = await self._warming.ask(refs, versions=True)
            wanted = await asyncio.to_thread(_pins_of, asked, uids)
            new = await self._pins.add(wanted)
            work = Round(asked, CACHED, self._transfers, send)
            totals = await self._warming.fetch(work, keep)
            await self._pins.remove(self._missing_pins(new), peer.uid)
            await self._pins.save()
            await send({"event": "done", **totals, "pins": self._pins.to_json()})

    def _missing_pins(self, urls: Iterable[str]) -> list[Pin]:
        """Return the pins on urls whose shards are not cached."""
        pins = [self._pins.get(url) for url in urls]
        return [pin for pin in pins if pin is not None and pin.key not in self._store.shards]

    async def unpin(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the user's pins on matching shards, a trusted user everyone's.

        Raises DiskError; ConfigError for a pattern of an unknown protocol.
        """
        await Origins.check_protocols(patterns)
        matches = await asyncio.to_thread(matcher, patterns)
        pins = [pin async for pin in self._visible_pins(peer) if matches(pin.url)]
        left = await self._pins.remove(pins, None if peer.is_trusted else peer.uid)
        unpinned: list[str] = []
        kept: list[Json] = []
        for url, pin in left.items():
            if pin is None:
                unpinned.append(url)
            else:
                kept.append({"url": url, "reason": pinned_by(pin)})
        return {"unpinned": unpinned, "kept": kept}

    async def pins(self, peer: Peer) -> AsyncIterator[Json]:
        """Yield the pins on urls that the user may see."""
        async for pin in self._visible_pins(peer):
            is_cached = pin.key in self._store.shards
            yield {
                "url": pin.url,
                "size_bytes": pin.size_bytes,
                "cached": is_cached,
                "uids": sorted(pin.uids),
            }

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

        They are followed by the objects of which parts are cached, so far as `cached_bytes` says.
        Raises ConfigError for a prefix of an unknown protocol.
        """
        await Origins.check_protocols([prefix])
        is_meant = self._under(prefix, peer)
        async for shard, facts in self._shards(is_meant):
            yield {
                "url": facts.url,
                "version": facts.version,
                "size_bytes": facts.size_bytes,
                "cached_bytes": facts.size_bytes,
                "samples": facts.samples,
                "leases": shard.leases,
                "pinned": shard.pinned,
                "used_at_s": shard.used_at_s,
            }
        async for file, url in self._part_files(is_meant):
            yield {
                "url": url,
                "version": file.partial.obj.version,
                "size_bytes": file.partial.obj.size_bytes,
                "cached_bytes": file.kept_parts_bytes,
                "samples": None,
                "leases": file.leases.total(),
                "pinned": False,
                "used_at_s": file.used_at_s,
            }

    def _under(self, prefix: str, peer: Peer) -> Callable[[str], bool]:
        """Return a predicate: may the user see this url, and is it under the prefix?"""
        visible = self.visible_to(peer)
        wanted = prefix  # which may end within the scheme
        if "://" in prefix or prefix.startswith("/"):
            wanted = canonical(prefix)
        return lambda url: canonical(url).startswith(wanted) and visible(url)

    async def _shards(
        self,
        is_meant: Callable[[str], bool],
    ) -> AsyncGenerator[tuple[Shard, Facts], None]:
        """Yield the published shards whose url is meant; quarantine damaged ones on the way."""
        for number, shard in enumerate(list(self._store.shards.values())):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if shard.facts is not None and not is_meant(shard.facts.url):
                continue  # without reading its sidecar
            try:
                facts = await self._store.facts(shard)
            except CorruptShardError as exn:
                await self._health.take_out(shard, exn)
                continue
            if is_meant(facts.url) and self._store.shards.get(shard.key) is shard:
                yield shard, facts

    async def _part_files(
        self,
        is_meant: Callable[[str], bool],
    ) -> AsyncGenerator[tuple[PartFile, str], None]:
        """Yield the objects of which parts are cached, with their urls, if these are meant."""
        for number, file in enumerate(list(self._store.part_files.values())):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            url = stored_url(file.partial.obj.url)
            if file.is_own and is_meant(url):
                yield file, url

    async def named_path(self, shard: Shard, facts: Facts) -> Path:
        """Return a path of a leased shard that ends with its object's name: libraries go by it."""
        return await self._store.named_path(shard, facts)

    async def evict(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the matching shards that the user may see; report those that stayed and why.

        Raises ConfigError for a pattern of an unknown protocol.
        """
        await Origins.check_protocols(patterns)
        matches = await asyncio.to_thread(matcher, patterns)
        visible = self.visible_to(peer)
        evicted: list[str] = []
        kept: list[Json] = []
        freed_bytes = 0

        def is_meant(url: str) -> bool:
            return matches(url) and visible(url)

        async for shard, facts in self._shards(is_meant):
            if shard.stays:
                kept.append({"url": facts.url, "reason": self._why_it_stays(shard, facts)})
            elif await self._residency.evict(shard):
                evicted.append(facts.url)
                freed_bytes += shard.kept_bytes
            else:
                reason = "a process still has it open, or a hard link to it exists"
                kept.append({"url": facts.url, "reason": reason})

        async for file, url in self._part_files(is_meant):
            parts_bytes = await self._residency.parts.evict_all(file)
            freed_bytes += parts_bytes
            if parts_bytes:
                evicted.append(url)
            else:
                kept.append({"url": url, "reason": "ranges of it are being read"})
        return {"evicted": evicted, "kept": kept, "freed_bytes": freed_bytes}

    def _why_it_stays(self, shard: Shard, facts: Facts) -> str:
        if shard.pinned:
            pin = self._pins.get(facts.url)
            if pin is not None:
                return pinned_by(pin)
        return f"in use by {shard.leases} reader(s)"

    async def verify(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Read every shard under a url prefix again, and quarantine damaged ones; yield events.

        The last event also counts the shards that were refused when they last arrived, and thus are
        not cached. Raises ConfigError for a prefix of an unknown protocol.
        """
        await Origins.check_protocols([prefix])
        shards = [found async for found in self._shards(self._under(prefix, peer))]
        files = [found async for found in self._part_files(self._under(prefix, peer))]
        total_bytes = sum(shard.size_bytes for shard, _ in shards)
        total_bytes += sum(file.kept_parts_bytes for file, _ in files)
        count = len(shards) + len(files)
        yield {"event": "start", "shards": count, "total_bytes": total_bytes}
        done_shards = 0
        done_bytes = 0
        corrupt = 0
        async for url, size_bytes, error in self._verified(shards, files):
            if isinstance(error, CorruptShardError):
                corrupt += 1
            done_shards += 1
            done_bytes += size_bytes
            result: Json = {"event": "shard", "url": url, "ok": error is None}
            if error is not None:
                result["error"] = error.to_json()
            yield result
            yield {
                "event": "progress",
                "done_shards": done_shards,
                "shards": count,
                "done_bytes": done_bytes,
                "total_bytes": total_bytes,
            }
        refused = len(self._status_page.refused(self._under(prefix, peer)))
        yield {
            "event": "done",
            "shards": count,
            "corrupt": corrupt,
            "refused": refused,
            "bytes": done_bytes,
        }

    async def _verified(
        self,
        shards: Sequence[tuple[Shard, Facts]],
        files: Sequence[tuple[PartFile, str]],
    ) -> AsyncIterator[tuple[str, int, CacheError | CorruptShardError | None]]:
        """Read shards and parts again; yield the url and size of each, and what is wrong."""
        for shard, facts in shards:
            yield facts.url, shard.size_bytes, await self._verify(shard)
        for file, url in files:
            size_bytes = file.kept_parts_bytes
            yield url, size_bytes, await self._verify_parts(file, url)

    async def _verify(self, shard: Shard) -> CorruptShardError | ExhaustedError | None:
        if self._store.shards.get(shard.key) is not shard:
            return None  # evicted since it was listed
        try:
            with self._residency.retained(shard):
                await self._store.check(shard)
        except (CorruptShardError, ExhaustedError) as exn:
            if isinstance(exn, CorruptShardError):
                await self._health.take_out(shard, exn)
            return exn
        return None

    async def _verify_parts(
        self,
        file: PartFile,
        url: str,
    ) -> CacheError | CorruptShardError | None:
        if self._store.part_files.get(file.partial.key) is not file:
            return None  # evicted since it was listed, or being completed
        try:
            damaged = await self._residency.parts.verify(file)
        except CacheError as exn:
            return exn
        if not damaged:
            return None
        numbers = ", ".join(map(str, damaged))
        what = f"parts {numbers} of the cached file {file.partial.path} are damaged; dropped"
        return CorruptShardError(what, url=url)

    # State

    def status(self, peer: Peer) -> Json:
        """Return the contents and current activity of the cache."""
        own = {
            "disk": self._disk(),
            "scrub": self._scrubber.to_json(),
            "pins": self._pins.to_json(),
        }
        return self._status_page.page(self.visible_to(peer)) | own

    async def lost(self) -> None:
        """Return once the cache folder was found deleted with the folder around it."""
        await self._health.lost()

    async def unreachable(self, socket: Path) -> None:
        """Return once the daemon's socket was found deleted."""
        await self._health.until(lambda: not socket.exists())

    def health(self) -> Json:
        """Return `status` (`ok` or `degraded`) and the state of the disk.

        While it is degraded, only cached shards are served.
        """
        is_well = self._health.error is None and not self._residency.short_bytes
        return {"status": "ok" if is_well else "degraded", "disk": self._disk()}

    def _disk(self) -> Json:
        space = self._store.space
        short_bytes = space.capacity_bytes - space.effective_bytes()
        return self._health.to_json() | {"short_bytes": short_bytes}


def _pins_of(refs: Sequence[ShardRef], uids: frozenset[int]) -> list[Pin]:
    """Return a pin for each shard of known version and size.

    Its footprint is an estimate until the shard arrives.
    """
    return [
        Pin(
            stored_url(ref.url),
            shard_key(place_of(ref.url, is_file=ref.is_file), ref.version),
            footprint_bytes(ref.size_bytes),
            uids,
        )
        for ref in refs
        if ref.version is not None and ref.size_bytes is not None
    ]
