"""The cache disk: its health, the shards that it damaged, and what of the folder is left once it has recovered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import structlog

from shardcache.cache.residency import Evictor
from shardcache.cache.waits import Signal
from shardcache.errors import CacheError, CorruptShardError, DiskError, DiskFullError, ExhaustedError
from shardcache.store.folder import CacheFolder, FolderDiff, compare_folder
from shardcache.store.shard import Shard

log = structlog.get_logger()

_LOOK_S = 5.0
# A full disk recovers soon, a failing one rarely: backing off keeps its kernel log from filling up.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class Health:
    """Health of one cache folder's disk: checked periodically, right after an error, and with backoff while it fails.

    Attributes:
        error: the present problem; None while healthy. With an error, cached shards are served but none is fetched.
    """

    def __init__(self, folder: CacheFolder, changed: Signal) -> None:
        self.error: DiskError | None = None
        self._folder = folder
        self._changed = changed
        self._since_s = time.monotonic()
        self._suspicion = asyncio.Event()
        self._suspicion.set()  # not checked yet
        self._looked = Signal()
        self._looking = False
        self._asked_s: float | None = None

    def __repr__(self) -> str:
        return f"Health({'well' if self.error is None else self.error.code!r})"

    def check(self, url: str) -> None:
        """Raise the disk's present error, if any, naming the url that cannot be fetched because of it."""
        if self.error is not None:
            raise type(self.error)(self.error.message, url=url, remedy=self.error.remedy)

    async def examine(self) -> bool:
        """Check the disk after a failure on it; return whether it is healthy, immediately if it is known to fail."""
        if self.error is None:
            self._suspicion.set()
        looks = self._looked.count + 1 + self._looking  # a check in progress may predate the failure
        while self.error is None and self._looked.count < looks:
            await self._looked.wait()
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        """Return `state` (`ok`, or the error's code), `error` and `since_s`, the time in this state.

        `silent_s` is the age of a check still without a result: a disk that hangs does not even return an error.
        """
        now_s = time.monotonic()
        silent_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        times = {"since_s": round(now_s - self._since_s, 3), "silent_s": round(silent_s, 3)}
        if self.error is None:
            return {"state": "ok", "error": None, **times}
        return {"state": self.error.code, "error": self.error.to_json(), **times}

    async def run(self, reconciler: Reconciler) -> None:
        """Monitor the disk until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.error is None:
                pause_s = _FIRST_PAUSE_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._suspicion.wait()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._look(reconciler)

    async def _look(self, reconciler: Reconciler) -> None:
        suspected = self._suspicion.is_set() or self.error is not None
        self._suspicion.clear()
        self._looking = True
        try:
            changed = await (self._probe(reconciler) if suspected else self._ask(self._folder.look))
            await reconciler.settle(changed or self.error is not None)
        except DiskError as exn:
            self._turn(exn)
        except ExhaustedError as exn:  # says nothing about the disk
            log.warning("cannot check the cache disk", cause=exn.message)
        else:
            self._turn(None)
        finally:
            self._looking = False
            self._looked.notify()

    async def _probe(self, reconciler: Reconciler) -> bool:
        try:
            return await self._ask(self._folder.probe)
        except DiskFullError:
            await reconciler.make_room()
        return await self._ask(self._folder.probe)

    async def _ask(self, question: Callable[[], bool]) -> bool:
        self._asked_s = time.monotonic()
        try:
            return await asyncio.to_thread(question)
        finally:
            self._asked_s = None

    def _turn(self, error: DiskError | None) -> None:
        previous, self.error = self.error, error
        if type(previous) is type(error):
            return
        self._changed.notify()
        lasted_s, self._since_s = time.monotonic() - self._since_s, time.monotonic()
        if error is None:
            log.warning("cache disk has recovered", after_s=round(lasted_s, 1))
        else:
            log.error("cache disk error; serving cached shards only", cause=error.message, remedy=error.remedy)


class Quarantine:
    """Takes corrupt shards out of service, unless the disk as a whole cannot be read."""

    def __init__(self, evictor: Evictor, health: Health) -> None:
        self.health = health
        self.inventory = evictor.inventory
        self._store = evictor.store
        self._counters = evictor.counters

    async def found(self, shard: Shard, exn: CorruptShardError) -> bool:
        """Take a shard out of service; False if the disk has failed, which proves nothing about the shard."""
        if not await self.health.examine():
            return False
        shard.damage = exn
        if shard.leases:
            log.error("corrupt shard is in use", shard=exn.url, leases=shard.leases)
        await self.isolate(shard, exn)
        return True

    async def isolate(self, shard: Shard, exn: CorruptShardError) -> None:
        """Take a corrupt shard out of service; the next request re-fetches it."""
        if self._store.shards.get(shard.key) is not shard:
            return  # evicted or quarantined, and perhaps re-fetched, during the check
        log.error("cached shard is damaged; quarantined", shard=exn.url, cause=exn.message)
        self._counters.corrupt += 1
        self.inventory.gone(shard.key)
        try:
            await self._store.quarantine(shard)
        except CacheError as failure:  # it is out of service in any case
            log.warning("cannot move the corrupt shard to quarantine yet", shard=exn.url, cause=failure.message)
        self.inventory.changed.notify()


class Reconciler:
    """Reconciles store and plan with the contents of the cache folder: forgets lost shards, restores others."""

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor
        self._inventory = evictor.inventory
        self._store = evictor.store

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
        self._inventory.pins.schedule_save()  # their file may have been lost with the folder
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

    def _is_arriving(self, key: str) -> bool:
        return key in self._evictor.claims  # a transfer owns the files
