"""The operations that users request, connected to what they work on."""

from __future__ import annotations

from shardcache.cache.catalog.history import History
from shardcache.cache.catalog.sample_counts import Counting
from shardcache.cache.operations.maintenance import Maintenance
from shardcache.cache.operations.pinning import Pinning
from shardcache.cache.operations.warming import Warming
from shardcache.cache.readers.leasing import Leasing
from shardcache.cache.residency.residency import Residency
from shardcache.cache.transfers.transfers import Transfers
from shardcache.config import Settings
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.store.indexers import Indexers
from shardcache.store.store import Store


class Operations:
    """One object for each kind of request."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        origins: Origins,
        downloader: Downloader,
        residency: Residency,
        transfers: Transfers,
        leasing: Leasing,
        history: History,
        indexers: Indexers,
    ) -> None:
        most = settings.max_transfers
        evictor, pins = residency.evictor, residency.pins
        self.maintenance = Maintenance(store, evictor, residency.inventory, pins, residency.quarantine)
        self.warming = Warming(store, transfers, leasing, origins, downloader, most)
        self.pinning = Pinning(pins, self.warming)
        self.counting = Counting(store, transfers, leasing, history, origins, downloader, indexers, most)
