"""Assembly of the cache's services, in the order in which they use each other.

`Cache` calls the four functions in order: the core, the services that fetch, those that request
shards, and the views. A transfer fetches one shard, or ranges of one object, for all who wait for
it. The counters are those of the daemon's metrics.
"""

import asyncio
from dataclasses import dataclass

from shardcache.access.rules import AllowList
from shardcache.cache.bulk.counting import Counting
from shardcache.cache.bulk.inventory import Inventory
from shardcache.cache.bulk.warming import Warming
from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.fetching.companions import Companions
from shardcache.cache.fetching.fetcher import Fetcher
from shardcache.cache.fetching.leasing import Leasing
from shardcache.cache.fetching.part_filler import PartFiller
from shardcache.cache.fetching.prefetcher import Prefetcher
from shardcache.cache.fetching.publisher import Publisher
from shardcache.cache.fetching.shard_indexing import ShardIndexing
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.manifests import ListingLimits, Manifests
from shardcache.cache.objects.known_objects import KnownObjects
from shardcache.cache.objects.object_reads import ObjectReads
from shardcache.cache.objects.permitted_objects import Objects
from shardcache.cache.planner import Planner
from shardcache.cache.readers.readers import Readers
from shardcache.cache.readers.services import ReaderServices
from shardcache.cache.scrubber import Scrubber
from shardcache.cache.space.pins import Pins
from shardcache.cache.space.residency import Residency
from shardcache.cache.versions.history import History
from shardcache.cache.versions.revalidation import Revalidation
from shardcache.cache.views.live_view import LiveView
from shardcache.cache.views.reasons import Reasons
from shardcache.cache.views.status_page import StatusPage
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.turns import Turns
from shardcache.config.origin_table import table_of
from shardcache.config.settings import Settings
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.plan.object_parts import whole_share
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.store import Store


@dataclass(frozen=True, slots=True)
class Inputs:
    """Objects that a cache is built from, and that its services share.

    Attributes:
        settings: the daemon's settings.
        store: the cache folder.
        origins: the object stores.
        downloader: makes requests to the object stores.
        indexers: the processes that index shards.
        group: runs the tasks of the cache.
    """

    settings: Settings
    store: Store
    origins: Origins
    downloader: Downloader
    indexers: Indexers
    group: asyncio.TaskGroup


@dataclass(frozen=True, slots=True)
class Core:
    """Services that know which shards there are, and keep the cached ones.

    Attributes:
        allow: rules of the urls that each user may request.
        turns: turns on the event loop, which long computations take for each of their pieces.
        changed: notified when anything has changed that a transfer or a reader waits for.
    """

    allow: AllowList
    turns: Turns
    changed: Signal
    # These services know which shards there are, and in which versions.
    history: History
    planner: Planner
    manifests: Manifests
    revalidation: Revalidation
    # These services keep the cached shards.
    pins: Pins
    residency: Residency
    health: DiskHealth
    scrubber: Scrubber


def assemble_core(inputs: Inputs) -> Core:
    """Build the services that know which shards there are, and keep the cached ones."""
    settings = inputs.settings
    store = inputs.store
    origins = inputs.origins
    downloader = inputs.downloader
    counters = downloader.counters
    listing_ttl_s = settings.listing_ttl_s
    allow = AllowList(settings.allow)
    turns = Turns()
    changed = Signal()

    history = History(store)
    planner = Planner(store.shards)
    # Lists of shards that are in no plan may take half as much memory as plans.
    listing_limits = ListingLimits(listing_ttl_s, memory_bytes=settings.plan_memory // 2)
    revalidation = Revalidation(store, origins, planner, counters, inputs.group, listing_ttl_s)
    manifests = Manifests(
        origins,
        downloader,
        history,
        revalidation,
        allow,
        listing_limits,
    )

    pins = Pins(store, turns, settings.max_pinned)
    residency = Residency(store, planner, pins, counters, changed)
    health = DiskHealth(store, residency, pins, changed)
    scrubber = Scrubber(
        store,
        health,
        residency.parts,
        changed,
        settings.scrub_rate,
        settings.scrub_pause_s,
    )
    return Core(
        allow=allow,
        turns=turns,
        changed=changed,
        history=history,
        planner=planner,
        manifests=manifests,
        revalidation=revalidation,
        pins=pins,
        residency=residency,
        health=health,
        scrubber=scrubber,
    )


def _part_filler(inputs: Inputs, core: Core) -> PartFiller:
    """Build the service that fetches ranges of objects."""
    settings = inputs.settings

    def max_share_of(url: str) -> float:
        """Return the share of an object's parts above which the whole object is fetched."""
        table = table_of(settings.origin, url)
        return whole_share(
            settings.whole_from_percent,
            settings.range_part_size,
            table.price_per_gb,
            table.price_per_1000_requests,
        )

    return PartFiller(
        inputs.store,
        core.residency,
        inputs.downloader,
        settings.range_part_size,
        max_share_of,
    )


@dataclass(frozen=True, slots=True)
class Fetching:
    """Services that fetch shards, and find those that are cached.

    Attributes:
        transfers: the running transfers, and the start of others.
        prefetcher: starts transfers of the shards that plans need next.
        leasing: finds a shard in the cache, or waits for its transfer.
    """

    transfers: Transfers
    prefetcher: Prefetcher
    leasing: Leasing


def assemble_fetching(inputs: Inputs, core: Core) -> Fetching:
    """Build the services that fetch shards. Their transfers will run in `inputs.group`."""
    settings = inputs.settings
    store = inputs.store
    origins = inputs.origins
    downloader = inputs.downloader
    counters = downloader.counters
    planner = core.planner
    residency = core.residency
    health = core.health
    history = core.history
    changed = core.changed

    # In some formats, a shard can be indexed only with a companion: a file next to it.
    companions = Companions(origins, downloader)
    indexing = ShardIndexing(origins, inputs.indexers, companions)
    publisher = Publisher(store, residency, indexing, history, changed)
    filler = _part_filler(inputs, core)
    fetcher = Fetcher(
        store,
        planner,
        residency,
        health,
        origins,
        downloader,
        publisher,
        filler,
        settings.part_size,
        counters,
        changed,
    )
    # A transfer becomes more urgent when a reader begins to wait for it. The scheduler then asks
    # all downloads for their priorities again, and reassigns the connections.
    reconsider = downloader.scheduler.reconsider
    transfers = Transfers(fetcher.fetch, reconsider, planner, counters, changed, inputs.group)

    max_transfers = settings.max_transfers
    prefetcher = Prefetcher(store, planner, residency, health, transfers, max_transfers, changed)
    revalidation = core.revalidation
    leasing = Leasing(
        store,
        planner,
        residency,
        transfers,
        health,
        history,
        revalidation,
        counters,
        settings.range_part_size,
    )
    return Fetching(transfers, prefetcher, leasing)


@dataclass(frozen=True, slots=True)
class Requesting:
    """Services that request shards on behalf of readers, clients and users.

    Attributes:
        readers: the connected readers.
        objects: serves clients that request one object at a time.
        warming: fetches lists of shards.
        counting: counts the samples and tokens in lists of shards, for `shardcache index`.
        inventory: shows, verifies and evicts cached shards.
    """

    readers: Readers
    objects: Objects
    warming: Warming
    counting: Counting
    inventory: Inventory


def _objects(inputs: Inputs, core: Core, leasing: Leasing) -> Objects:
    """Build the service for clients that request one object at a time."""
    store = inputs.store
    downloader = inputs.downloader
    known = KnownObjects(core.manifests, store, inputs.settings.listing_ttl_s)
    reads = ObjectReads(leasing, core.residency, store.layout, downloader.counters)
    return Objects(reads, known, inputs.origins, downloader, core.allow)


def assemble_requesting(inputs: Inputs, core: Core, fetching: Fetching) -> Requesting:
    """Build the services that request shards."""
    settings = inputs.settings
    store = inputs.store
    origins = inputs.origins
    downloader = inputs.downloader
    transfers = fetching.transfers
    leasing = fetching.leasing

    reader_services = ReaderServices(
        planner=core.planner,
        residency=core.residency,
        transfers=transfers,
        leasing=leasing,
        counters=downloader.counters,
        turns=core.turns,
        changed=core.changed,
    )
    readers = Readers(reader_services, settings.plan_memory)
    max_transfers = settings.max_transfers
    warming = Warming(store, transfers, leasing, origins, downloader, max_transfers)
    counting = Counting(
        store,
        transfers,
        leasing,
        core.history,
        origins,
        downloader,
        inputs.indexers,
        max_transfers,
    )
    inventory = Inventory(
        store,
        core.residency,
        core.pins,
        core.health,
        transfers,
        core.allow,
    )
    objects = _objects(inputs, core, leasing)
    return Requesting(readers, objects, warming, counting, inventory)


@dataclass(frozen=True, slots=True)
class Views:
    """Views of the cache, for users to look at."""

    reasons: Reasons
    live_view: LiveView
    status_page: StatusPage


def assemble_views(inputs: Inputs, core: Core, fetching: Fetching, readers: Readers) -> Views:
    """Build the views."""
    store = inputs.store
    downloader = inputs.downloader
    planner = core.planner
    residency = core.residency
    transfers = fetching.transfers

    reasons = Reasons(readers, transfers, residency, store.space, downloader)
    live_view = LiveView(store, planner, readers, transfers, reasons, core.turns)
    status_page = StatusPage(
        store,
        planner,
        downloader.counters,
        readers,
        transfers,
        fetching.prefetcher,
        residency,
        downloader,
        inputs.origins,
        reasons,
    )
    return Views(reasons, live_view, status_page)
