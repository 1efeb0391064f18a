"""Reconciliation with the cache folder once the disk is healthy: forget lost shards, restore those that reappeared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from shardcache.cache.residency.evictor import Evictor
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.residency.pins import Pins
from shardcache.store.recovery import FolderDiff, compare_folder
from shardcache.store.store import Store

log = structlog.get_logger()


class Reconciler:
    """Reconciles store and plan with the contents of the cache folder.

    Args:
        is_arriving: returns whether a transfer owns the files of a key, which are then left alone.
    """

    def __init__(
        self,
        store: Store,
        inventory: Inventory,
        evictor: Evictor,
        pins: Pins,
        is_arriving: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._inventory = inventory
        self._evictor = evictor
        self._pins = pins
        self._is_arriving = is_arriving

    async def make_room(self) -> None:
        """Evict shards if other programs fill the disk. Raises DiskError."""
        await self._evictor.keep_free()

    async def settle(self, was_away: bool) -> None:
        """Keep space free and, if the disk was unavailable, reconcile with its contents. Raises DiskError."""
        await asyncio.to_thread(self._store.catalogue.reopen)
        if was_away:
            await self._take_stock()
        await self.make_room()

    async def _take_stock(self) -> None:
        store = self._store
        await store.set_aside()
        stock = await asyncio.to_thread(compare_folder, store.layout, store.known(), tuple(store.leftovers.values()))
        gone = [key for key in stock.gone if self._forget(key)]
        back = self._welcome(stock)
        self._pins.note()  # their file may have been lost with the folder
        if gone or back:
            log.warning("the cache folder has changed", gone=len(gone), shards_back=back)

    def _forget(self, key: str) -> bool:
        was_served = key in self._store.shards
        known = self._store.forget(key)
        if was_served:
            self._inventory.gone(key)
        return known

    def _welcome(self, stock: FolderDiff) -> int:
        found = [shard for shard in stock.found if self._is_new(shard.key)]
        for shard in found:
            self._store.restore(shard)
            self._evictor.arrived(shard)
        for part in stock.parts:
            if not self._is_arriving(part.key):
                self._store.leave(part)
        return len(found)

    def _is_new(self, key: str) -> bool:
        return key not in self._store.known() and not self._is_arriving(key)
