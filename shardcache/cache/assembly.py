"""Assembly of the cache's parts, in the order in which they use each other."""

import asyncio
from dataclasses import dataclass

from shardcache.access import AllowList
from shardcache.cache.bulk.counting import Counting
from shardcache.cache.bulk.warming import Warming
from shardcache.cache.disk_health import Health
from shardcache.cache.fetching.fetcher import Fetcher
from shardcache.cache.fetching.leasing import Leasing
from shardcache.cache.fetching.prefetcher import Prefetcher
from shardcache.cache.fetching.publisher import Publisher
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.manifests import Manifests
from shardcache.cache.planner import Planner
from shardcache.cache.readers.readers import Readers
from shardcache.cache.scrubber import Scrubber
from shardcache.cache.space.pins import Pins
from shardcache.cache.space.residency import Residency
from shardcache.cache.versions.history import History
from shardcache.cache.versions.revalidation import Revalidation
from shardcache.cache.views.live_view import LiveView
from shardcache.cache.views.reasons import Reasons
from shardcache.cache.views.status_page import StatusPage
from shardcache.cache.waiting.turns import Turns
from shardcache.config import Settings
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.store import Store


@dataclass(frozen=True, slots=True)
class Parts:
    """What is known of shards, keeps them, and fetches them."""

    turns: Turns
    allow: AllowList
    # What is known of shards
    history: History
    manifests: Manifests
    revalidation: Revalidation
    # What is kept
    pins: Pins
    residency: Residency
    health: Health
    scrubber: Scrubber
    # What is fetched
    transfers: Transfers
    prefetcher: Prefetcher
    leasing: Leasing


def assemble(
    settings: Settings,
    store: Store,
    origins: Origins,
    downloader: Downloader,
    indexers: Indexers,
    group: asyncio.TaskGroup,
) -> Parts:
    """Build the parts of a cache; its transfers and revalidations will run in `group`."""
    counters = downloader.counters
    ttl_s = settings.listing_ttl_s
    turns = Turns()
    allow = AllowList(settings.allow)

    history = History(store)
    planner = Planner(store.shards)
    unplanned_bytes = settings.plan_memory // 2
    manifests = Manifests(origins, downloader, history, allow, ttl_s, unplanned_bytes)
    revalidation = Revalidation(store, origins, planner, counters, group, ttl_s)

    pins = Pins(store, turns, settings.max_pinned)
    residency = Residency(store, planner, pins, counters)
    health = Health(residency)
    scrubber = Scrubber(residency, health, settings.scrub_rate, settings.scrub_pause_s)

    publisher = Publisher(residency, origins, history, indexers)
    fetcher = Fetcher(residency, health, origins, downloader, publisher, settings.part_size)
    transfers = Transfers(fetcher.fetch, downloader.scheduler.deal, residency, group)
    prefetcher = Prefetcher(residency, health, transfers, settings.max_transfers)
    leasing = Leasing(residency, transfers, health, history, revalidation)

    return Parts(
        turns=turns,
        allow=allow,
        history=history,
        manifests=manifests,
        revalidation=revalidation,
        pins=pins,
        residency=residency,
        health=health,
        scrubber=scrubber,
        transfers=transfers,
        prefetcher=prefetcher,
        leasing=leasing,
    )


@dataclass(frozen=True, slots=True)
class Uses:
    """Who asks for shards, and what is shown of that."""

    readers: Readers
    warming: Warming
    counting: Counting
    reasons: Reasons
    live_view: LiveView
    status_page: StatusPage


def assemble_uses(
    parts: Parts,
    settings: Settings,
    store: Store,
    origins: Origins,
    downloader: Downloader,
    indexers: Indexers,
) -> Uses:
    """Build what uses a cache's parts."""
    at_once = settings.max_transfers
    turns = parts.turns
    history = parts.history
    residency = parts.residency
    transfers = parts.transfers
    prefetcher = parts.prefetcher
    leasing = parts.leasing

    readers = Readers(residency, transfers, leasing, turns, settings.plan_memory)
    warming = Warming(store, transfers, leasing, origins, downloader, at_once)
    counting = Counting(
        store,
        transfers,
        leasing,
        history,
        origins,
        downloader,
        indexers,
        at_once,
    )

    reasons = Reasons(readers, transfers, residency, downloader)
    live_view = LiveView(readers, transfers, residency, reasons, turns)
    status_page = StatusPage(
        readers,
        transfers,
        prefetcher,
        residency,
        downloader,
        origins,
        reasons,
    )
    return Uses(readers, warming, counting, reasons, live_view, status_page)
