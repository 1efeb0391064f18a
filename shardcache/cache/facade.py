"""The whole cache behind one class, `Cache`, for the server and the program that starts the daemon.

A peer is the user who is connected, as the kernel reports it; the rules say which urls that user
may see and request. Patterns are what users write in place of urls: urls with braces or wildcards,
prefixes, and index files. `wanted` says which of the matching objects are meant, and whether their
samples or their own bytes are read; `listings.shard_listing` explains its values.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from shardcache.access.rules import Peer
from shardcache.cache.assembly import (
    Inputs,
    assemble_core,
    assemble_fetching,
    assemble_requesting,
    assemble_views,
)
from shardcache.cache.background import BackgroundTasks
from shardcache.cache.bulk.round import Round, Send, reporting_retries
from shardcache.cache.bulk.warming import CACHED
from shardcache.cache.fetching.leasing import Published
from shardcache.cache.fetching.prefetcher import Prefetcher
from shardcache.cache.listings.matching import matcher
from shardcache.cache.space.pins import describe_pin
from shardcache.cache.versions.history import History
from shardcache.config.settings import Settings
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.shared.protocol import Json, ShardRef, Wanted
from shardcache.shared.tarindex.named_members import TokenMember
from shardcache.shared.urls.url_names import may_name_index
from shardcache.store.folder.pins_file import Pin
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.keys import place_of, shard_key, stored_url
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store

_AT_ONCE = 256  # number of pins looked at before other tasks get a turn, as there may be many


class Cache:
    """One node's open cache: services for readers, and the requests of users.

    The background tasks and the transfers run in `group` until `stop`.

    Attributes:
        layout: paths in the cache folder.
        session_credentials: the credentials for origins that sessions have handed over.
        counters: the daemon's counters.
        bills: the bill of the node for requests and bytes, and one for each job.
        measures: durations, for metrics.
        turns: divides long computations into short turns on the event loop.
        manifests: resolves patterns to lists of shards.
        readers: the connected readers.
        objects: objects for clients that request one at a time.
        reasons: reasons in words why readers wait.
        live_view: data of open dashboard pages.
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
        # Each group of services uses those of the groups before it.
        inputs = Inputs(settings, store, origins, downloader, indexers, group)
        core = assemble_core(inputs)
        fetching = assemble_fetching(inputs, core)
        requesting = assemble_requesting(inputs, core, fetching)
        views = assemble_views(inputs, core, fetching, requesting.readers)
        self.layout = store.layout
        self.session_credentials = origins.session_credentials
        self.counters = downloader.counters
        self.bills = downloader.counters.bills
        self.measures = downloader.counters.measures
        self.turns = core.turns
        self.manifests = core.manifests
        self.readers = requesting.readers
        self.objects = requesting.objects
        self.reasons = views.reasons
        self.live_view = views.live_view
        self._store = store
        self._downloader = downloader
        self._allow = core.allow
        self._revalidation = core.revalidation
        self._pins = core.pins
        self._residency = core.residency
        self._health = core.health
        self._scrubber = core.scrubber
        self._transfers = fetching.transfers
        self._warming = requesting.warming
        self._counting = requesting.counting
        self._inventory = requesting.inventory
        self._status_page = views.status_page
        self._background = BackgroundTasks(group)
        self._start(core.history, fetching.prefetcher, origins)

    def _start(self, history: History, prefetcher: Prefetcher, origins: Origins) -> None:
        """Start the background tasks."""
        self._background.start("prefetch", prefetcher.run)
        self._background.start("history", history.rebuild)
        self._background.start("health", self._health.run)
        self._background.start("scrub", self._scrubber.run)
        self._background.start("pins", self._pins.run)
        # A tier is a cache in front of an origin that the nodes of a cluster share. Its status on
        # this node is read again and again.
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
        return lambda url: self._allow.may_see(url, peer)

    # Requests for lists of shards. `send` gets the events, which are the lines of the response; an
    # exception from it aborts the request.

    async def warm(
        self,
        patterns: Sequence[str],
        peer: Peer,
        send: Send,
        wanted: Wanted = "shards",
    ) -> None:
        """Fetch every shard or file that the patterns match.

        If `wanted` is "files", every object is fetched as it is, and no samples are indexed. Raises
        CapacityError, OriginError.
        """
        async with self._resolved(patterns, peer, send, wanted) as refs:
            await self._warming.warm(refs, send)

    async def index(
        self,
        patterns: Sequence[str],
        peer: Peer,
        send: Send,
        member: TokenMember | None = None,
    ) -> None:
        """Count the samples of every matching shard.

        Raises OriginError.

        Args:
            patterns: the patterns.
            peer: the user.
            send: gets the events.
            member: the member of each sample whose tokens are counted as well; None to count only
                samples.
        """
        # The origins are listed anew, so the versions are current. But an index file may state
        # versions that its shards no longer have.
        has_index_file = any(may_name_index(pattern) for pattern in patterns)
        async with self._resolved(patterns, peer, send, "samples", max_age_s=0) as refs:
            await self._counting.count(refs, send, are_current=not has_index_file, member=member)

    @asynccontextmanager
    async def _resolved(
        self,
        patterns: Sequence[str],
        peer: Peer,
        send: Send,
        wanted: Wanted,
        *,
        max_age_s: float = math.inf,
    ) -> AsyncIterator[Sequence[ShardRef]]:
        """Provide the shards and files that patterns match, for use during the block.

        Until the end of the block, `send` also gets events about requests to origins that failed
        and will be repeated.

        Args:
            patterns: the patterns.
            peer: the user.
            send: gets the events.
            wanted: which objects are meant, and what is read of them.
            max_age_s: age of the oldest listing that may be used.
        """
        # To list the shards, origins are asked for the patterns; after that, for each shard's url.
        async with reporting_retries(patterns, self._downloader, send):
            listing = await self.manifests.resolve(
                patterns,
                peer,
                max_age_s=max_age_s,
                wanted=wanted,
            )
        urls = frozenset(listing.shards.urls)
        async with reporting_retries(urls, self._downloader, send):
            # This runs in a thread, as there may be a million shards.
            yield await asyncio.to_thread(lambda: listing.read_as(wanted).refs())

    async def pin(self, patterns: Sequence[str], peer: Peer, send: Send) -> None:
        """Pin every shard or file that the patterns match, and fetch the missing ones.

        Shards that cannot be fetched are not pinned, unless they were pinned before. If `send`
        raises an exception, as when the user has disconnected, all pins remain: a shard that is
        still missing is kept once a later request has fetched it. Raises CapacityError, DiskError,
        OriginError.
        """
        async with self._resolved(patterns, peer, send, "shards") as refs:
            # A pin needs the shard's version and size. Shards are pinned before they are fetched,
            # so that those which are cached already are not evicted for the others.
            complete_refs = await self._warming.with_sizes(refs, versions=True)
            pins = await asyncio.to_thread(_pins_of, complete_refs, peer.uid)
            new_urls = await self._pins.add(pins)
            # Shards that need not be fetched count as cached.
            work = Round(complete_refs, self._transfers, send, unfetched_state=CACHED)
            totals = await self._warming.fetch(work, partial(self._keep, uid=peer.uid))
            # Shards that could not be fetched lose the pins that this request has added.
            await self._pins.remove(self._missing_pins(new_urls), peer.uid)
            await self._pins.save()
            await send({"event": "done", **totals, "pins": self._pins.to_json()})

    async def _keep(self, published: Published, uid: int) -> None:
        """Keep a cached shard by a user's pin.

        Raises CapacityError if an unexpected size exceeds the pin limit.
        """
        url = published.facts.url
        shard = published.shard
        pin = self._pins.get(url)
        if pin is None or uid not in pin.uids:
            # The shard was not pinned before it was fetched, as its version or size was unknown.
            await self._pins.add([Pin(url, shard.key, shard.kept_bytes, frozenset({uid}))])
        # The pin gets the shard's version and size. `Residency` reports these only of a shard that
        # arrives, not of one that was cached before the pin was made.
        self._pins.arrived(shard)

    def _missing_pins(self, urls: Iterable[str]) -> list[Pin]:
        """Return the pins on urls whose shards are not cached."""
        pins = [self._pins.get(url) for url in urls]
        return [pin for pin in pins if pin is not None and pin.key not in self._store.shards]

    async def unpin(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the user's pins on matching shards; for a trusted user, the pins of all users.

        Returns the urls that are no longer pinned, and the urls that other users still pin. Raises
        DiskError, and ConfigError for a pattern of an unknown protocol.
        """
        await Origins.check_protocols(patterns)
        matches = await asyncio.to_thread(matcher, patterns)
        pins = [pin async for pin in self._visible_pins(peer) if matches(pin.url)]
        uid = None if peer.is_trusted else peer.uid  # None stands for all users
        remaining_by_url = await self._pins.remove(pins, uid)
        unpinned: list[str] = []
        kept: list[Json] = []
        for url, remaining in remaining_by_url.items():
            if remaining is None:  # no user pins the url any more
                unpinned.append(url)
            else:
                kept.append({"url": url, "reason": describe_pin(remaining)})
        return {"unpinned": unpinned, "kept": kept}

    async def pins(self, peer: Peer) -> AsyncIterator[Json]:
        """Yield each pin on a url that the user may see, as JSON."""
        async for pin in self._visible_pins(peer):
            is_cached = pin.key in self._store.shards
            yield {
                "url": pin.url,
                "size_bytes": pin.size_bytes,
                "cached": is_cached,
                "uids": sorted(pin.uids),
            }

    async def _visible_pins(self, peer: Peer) -> AsyncIterator[Pin]:
        """Yield the pins on urls that the user may see."""
        visible = self.visible_to(peer)
        # `Pins` iterates over a copy, so pins may change while other tasks have their turn.
        for number, pin in enumerate(self._pins):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if visible(pin.url):
                yield pin

    # The cached shards and parts

    def shards(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Yield the cached shards and parts, as `Inventory.rows` does."""
        return self._inventory.rows(prefix, peer)

    async def evict(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove cached shards and parts, as `Inventory.evict` does."""
        return await self._inventory.evict(patterns, peer)

    def verify(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Read cached shards and parts again, as `Inventory.verify` does."""
        return self._inventory.verify(prefix, peer)

    async def named_path(self, shard: Shard, facts: Facts) -> Path:
        """Return a path of a leased shard that ends with the name of its object.

        Some libraries choose how to read a file by its name.
        """
        return await self._store.named_path(shard, facts)

    # State

    def status(self, peer: Peer) -> Json:
        """Return the contents and current activity of the cache."""
        state = {
            "disk": self._disk(),
            "scrub": self._scrubber.to_json(),
            "pins": self._pins.to_json(),
        }
        return self._status_page.page(self.visible_to(peer)) | state

    async def until_lost(self) -> None:
        """Return once the cache folder has been found deleted along with its parent folder.

        The folder of a batch job is deleted in this way at the job's end. If only the cache folder
        is missing, the daemon creates it again.
        """
        await self._health.until_lost()

    async def until_unreachable(self, socket: Path) -> None:
        """Return once the daemon's socket has been found deleted."""
        await self._health.until(lambda: not socket.exists())

    def health(self) -> Json:
        """Return `status` (`ok` or `degraded`) and the state of the disk.

        It is degraded while the disk fails, so that only cached shards are served, or while
        --min-free cannot be met.
        """
        is_short_of_space = self._residency.min_free_short_bytes > 0
        is_degraded = self._health.error is not None or is_short_of_space
        return {"status": "degraded" if is_degraded else "ok", "disk": self._disk()}

    def _disk(self) -> Json:
        """Return the state of the disk, and by how much it is too small for the capacity."""
        space = self._store.space
        short_bytes = space.capacity_bytes - space.effective_bytes()
        return self._health.to_json() | {"short_bytes": short_bytes}


def _pins_of(refs: Sequence[ShardRef], uid: int) -> list[Pin]:
    """Return a user's pin for each shard whose version and size are known.

    The size of a pin is an estimate until its shard arrives.

    Args:
        refs: the shards.
        uid: id of the user who pins them.
    """
    return [
        Pin(
            stored_url(ref.url),
            shard_key(place_of(ref.url, is_file=ref.is_file), ref.version),
            footprint_bytes(ref.size_bytes),
            frozenset({uid}),
        )
        for ref in refs
        if ref.version is not None and ref.size_bytes is not None
    ]
