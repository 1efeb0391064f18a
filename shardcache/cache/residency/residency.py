"""The shards on disk and the space that they take: the objects of this package, connected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.catalog.history import History
from shardcache.cache.loop_turns import Turns
from shardcache.cache.planner import Planner
from shardcache.cache.residency.disk_health import Health
from shardcache.cache.residency.evictor import Evictor
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.residency.pins import Pins
from shardcache.cache.residency.publishing import Ingester
from shardcache.cache.residency.quarantine import Quarantine
from shardcache.cache.residency.reconciler import Reconciler
from shardcache.cache.residency.scrubbing import Scrubber
from shardcache.cache.signal import Signal
from shardcache.config import Settings
from shardcache.metrics import Counters
from shardcache.store.indexers import Indexers
from shardcache.store.store import Store


class Residency:
    """Everything that decides which shards are on disk.

    Attributes:
        changed: notified when more shards may be evictable.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        planner: Planner,
        aliases: AliasTable,
        history: History,
        indexers: Indexers,
        counters: Counters,
        turns: Turns,
    ) -> None:
        self._store = store
        self.changed = changed = Signal()
        self.inventory = Inventory(store, planner, aliases, changed)
        self.health = Health(store.folder, changed)
        self.quarantine = Quarantine(store, self.inventory, self.health, counters, changed)
        self.pins = Pins(store, self.inventory, turns, settings.max_pinned)
        self.evictor = Evictor(store, planner, self.inventory, self.pins, self.health, counters, changed)
        self.ingester = Ingester(store, self.evictor, history, indexers)
        self.scrubber = Scrubber(
            store, self.health, self.quarantine, changed, settings.scrub_rate, settings.scrub_pause_s
        )

    def background(self, is_arriving: Callable[[str], bool]) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the functions that run in the background, by name; `is_arriving` is as for `Reconciler`."""
        reconciler = Reconciler(self._store, self.inventory, self.evictor, self.pins, is_arriving)
        health = partial(self.health.run, reconciler)
        return {"health": health, "scrub": self.scrubber.run, "pins": self.pins.run}
