"""Health of the cache disk."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import structlog

from shardcache.cache.space.pins import Pins
from shardcache.cache.space.reconciliation import reconcile
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.signals import Signal
from shardcache.errors import CorruptShardError, DiskError, DiskFullError, ExhaustedError
from shardcache.store.shard import Shard
from shardcache.store.store import Store

log = structlog.get_logger()

_CHECK_S = 5.0  # interval of checks of a healthy disk

# A full disk recovers soon, a failing one rarely: backing off keeps its kernel log from filling up.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class DiskHealth:
    """Health of the cache disk: checked periodically, right after errors, and while it fails.

    Args:
        changed: notified when the disk fails or recovers.

    Attributes:
        error: the disk's present error; None while it is healthy. With one, cached shards are
            served but none is fetched.
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        pins: Pins,
        changed: Signal,
    ) -> None:
        self.error: DiskError | None = None
        self._store = store
        self._residency = residency
        self._pins = pins
        self._changed = changed
        self._since_s = time.monotonic()  # start of the present state
        self._suspicion = asyncio.Event()  # set until the disk is checked by writing
        self._suspicion.set()
        self._checked = Signal()  # notified after each check
        self._is_checking = False
        self._check_began_s: float | None = None  # start of the check in progress, if there is one

    def __repr__(self) -> str:
        state = "healthy" if self.error is None else repr(self.error.code)
        return f"DiskHealth({state})"

    def check(self, url: str) -> None:
        """Raise the disk's present error, if any, naming the url that cannot be fetched."""
        if self.error is not None:
            raise type(self.error)(self.error.message, url=url, remedy=self.error.remedy)

    async def examine(self) -> bool:
        """Check the disk after a failure on it; return whether it is healthy.

        Returns at once if it is known to fail.
        """
        if self.error is None:
            self._suspicion.set()
        awaited_count = self._checked.count + 1
        if self._is_checking:
            awaited_count += 1  # the check in progress may predate the failure
        while self.error is None and self._checked.count < awaited_count:
            await self._checked.wait()
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        """Return `state` (`ok`, or the error's code), `error`, and the time in this state.

        `silent_s` is the age of a check still without a result: a disk that hangs does not even
        return an error.
        """
        now_s = time.monotonic()
        silent_s = 0.0
        if self._check_began_s is not None:
            silent_s = now_s - self._check_began_s
        return {
            "state": "ok" if self.error is None else self.error.code,
            "error": None if self.error is None else self.error.to_json(),
            "since_s": round(now_s - self._since_s, 3),
            "silent_s": round(silent_s, 3),
        }

    async def take_out(self, shard: Shard, exn: CorruptShardError) -> bool:
        """Take a corrupt shard out of service.

        Return False, and do nothing, if the disk fails, which proves nothing about the shard.
        """
        if not await self.examine():
            return False
        shard.damage = exn
        if shard.leases:
            log.error("corrupt shard is in use", shard=exn.url, leases=shard.leases)
        await self._residency.isolate(shard, exn)
        return True

    async def until_lost(self) -> None:
        """Return once the cache folder was found deleted with the folder around it."""
        await self.until(lambda: self._store.folder.is_lost)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds; it is tried after each check of the disk."""
        while not condition():
            await self._checked.wait()

    async def run(self) -> None:
        """Monitor the disk until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.error is None:
                pause_s = _FIRST_PAUSE_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_S):
                        await self._suspicion.wait()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._check_now()

    async def _check_now(self) -> None:
        """Check the disk, and bring what the daemon knows of the folder up to date."""
        is_suspected = self._suspicion.is_set() or self.error is not None
        self._suspicion.clear()
        self._is_checking = True
        try:
            if is_suspected:
                changed = await self._probe()
            else:
                changed = await self._timed(self._store.folder.look)
            await asyncio.to_thread(self._store.catalogue.reopen)
            if changed or self.error is not None:
                await reconcile(self._store, self._residency, self._pins)
            await self._residency.keep_free()
        except DiskError as exn:
            self._record(exn)
        except ExhaustedError as exn:  # says nothing about the disk
            log.warning("cannot check the cache disk", cause=exn.message)
        else:
            self._record(None)
        finally:
            self._is_checking = False
            self._checked.notify()

    async def _probe(self) -> bool:
        """Check the disk by writing; return whether the folder has changed. Raises DiskError."""
        try:
            return await self._timed(self._store.folder.probe)
        except DiskFullError:
            # Other programs have filled it: room for them is made by eviction.
            await self._residency.keep_free()
        return await self._timed(self._store.folder.probe)

    async def _timed(self, check: Callable[[], bool]) -> bool:
        """Run a check in a thread; `to_json` tells how long it has not returned."""
        self._check_began_s = time.monotonic()
        try:
            return await asyncio.to_thread(check)
        finally:
            self._check_began_s = None

    def _record(self, error: DiskError | None) -> None:
        """Record the disk's state; if it changes, log that, and wake all that wait for space."""
        previous = self.error
        self.error = error
        if type(previous) is type(error):  # still healthy, or failing in the same way
            return
        self._changed.notify()
        now_s = time.monotonic()
        lasted_s = now_s - self._since_s
        self._since_s = now_s
        if error is None:
            log.warning("cache disk has recovered", after_s=round(lasted_s, 1))
        else:
            log.error(
                "cache disk error; serving cached shards only",
                cause=error.message,
                remedy=error.remedy,
            )
