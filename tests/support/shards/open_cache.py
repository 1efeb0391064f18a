"""A whole cache of real parts in this process, with a store on disk and no daemon."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from shardcache.cache.assembly import (
    Core,
    Fetching,
    Inputs,
    Requesting,
    assemble_core,
    assemble_fetching,
    assemble_requesting,
)
from shardcache.cache.facade import Cache
from shardcache.config.settings import Settings
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters


class Parts(NamedTuple):
    """The parts of a cache, of which nothing runs in the background."""

    core: Core
    fetching: Fetching
    requesting: Requesting


class Ground:
    """Parts of which a cache is built.

    Attributes:
        inputs: an open store, origins and processes.
        events: what `send` was called with.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.events: list[dict[str, Any]] = []
        self._stops: list[Callable[[], None]] = []

    @property
    def store(self) -> Store:
        return self.inputs.store

    @property
    def counters(self) -> Counters:
        return self.inputs.downloader.counters

    async def send(self, event: dict[str, Any]) -> None:
        """Note an event of a request, but those of its progress, which come by the clock."""
        if event["event"] != "progress":
            self.events.append(event)

    def parts(self) -> Parts:
        core = assemble_core(self.inputs)
        fetching = assemble_fetching(self.inputs, core)
        self._stops += [fetching.transfers.stop, core.revalidation.stop]
        return Parts(core, fetching, assemble_requesting(self.inputs, core, fetching))

    def cache(self) -> Cache:
        inputs = self.inputs
        cache = Cache(
            inputs.settings,
            inputs.store,
            inputs.origins,
            inputs.downloader,
            inputs.indexers,
            inputs.group,
        )
        self._stops.append(cache.stop)
        return cache

    def stop(self) -> None:
        for stop in self._stops:
            stop()


@asynccontextmanager
async def ground(root: Path, **options: Any) -> AsyncIterator[Ground]:
    """Open a cache's store with these daemon options; end all that runs on leaving."""
    settings = Settings.load(
        {"cache_dir": root / "cache", "capacity": "1GB", "min_free": "0", **options}
    )
    store = Store.open(root / "cache", settings.capacity, settings.min_free)
    origins = Origins(settings.origin, max_connections=settings.max_connections)
    downloader = Downloader(settings, Counters())
    indexers = Indexers(1)
    try:
        async with asyncio.TaskGroup() as group:
            found = Ground(Inputs(settings, store, origins, downloader, indexers, group))
            try:
                yield found
            finally:
                found.stop()
    finally:
        await indexers.close()
        await origins.close()
        store.close()
