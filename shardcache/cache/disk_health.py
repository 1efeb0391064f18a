"""Health of the cache disk: checked periodically, right after errors, and while it fails.

A check looks at the cache folder; if there is a reason to doubt the disk, it is a probe, which also
writes a file. A check has no result if the daemon lacks memory or file descriptors for it. While
the disk fails, cached shards are served but none is fetched. `Fetcher`, `Leasing` and `Scrubber`
ask here before they conclude from an error that a shard is damaged.
"""

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
from shardcache.shared.exceptions import CorruptShardError, DiskError, DiskFullError, ExhaustedError
from shardcache.store.shard import Shard
from shardcache.store.store import Store

log = structlog.get_logger()

_CHECK_S = 5.0  # interval between checks of a healthy disk

# Pauses between checks of a disk that fails, each twice as long as the one before. A full disk
# recovers soon. A failing disk rarely does, and each check adds errors to the kernel's log.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class DiskHealth:
    """Monitor of the cache disk, which takes damaged shards out of service.

    Args:
        store: the cache folder.
        residency: the cached shards.
        pins: the pinned urls, which are saved again if the folder was replaced.
        changed: notified when the disk fails or recovers.

    Attributes:
        error: the disk's present error; None while the disk is healthy.
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
        self._since_s = time.monotonic()  # start of the present state, by the monotonic clock
        # Set while there is a reason to doubt the disk, until it is checked by writing. The disk is
        # doubted at the start, too.
        self._suspicion = asyncio.Event()
        self._suspicion.set()
        self._checked = Signal()  # notified after each check that had a result
        self._is_checking = False
        self._check_began_s: float | None = None  # start of the check in progress; None if none is

    def __repr__(self) -> str:
        state = "healthy" if self.error is None else repr(self.error.code)
        return f"DiskHealth({state})"

    def raise_if_failing(self, url: str) -> None:
        """Raise the present error of a disk that fails; no-op for a healthy one.

        Args:
            url: the url of the shard that cannot be fetched, for the error.
        """
        if self.error is not None:
            # The same error, for this url.
            raise type(self.error)(self.error.message, url=url, remedy=self.error.remedy)

    async def examine(self) -> bool:
        """Wait for a check of the disk after a failure on it; return whether the disk is healthy.

        Returns False at once if the disk is known to fail. If the daemon lacks the resources for a
        check, this waits until it has them.
        """
        if self.error is None:
            self._suspicion.set()
        awaited_count = self._checked.count + 1  # the next result
        if self._is_checking:
            awaited_count += 1  # that of the check in progress, which may predate the failure
        while self.error is None and self._checked.count < awaited_count:
            await self._checked.wait()
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        """Return `state` (`ok`, or the error's code), `error`, and the time in this state.

        `silent_s` is the time for which the check in progress has had no result; 0 if there is
        none. It shows a disk that hangs, as such a disk does not even return an error.
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
        """Take a corrupt shard out of service, unless it is the disk that fails.

        In that case, nothing is known about the shard: return False, and do nothing.

        Args:
            shard: the shard.
            exn: the damage found in it.
        """
        if not await self.examine():
            return False
        shard.damage = exn
        if shard.leases:
            log.error("corrupt shard is in use", shard=exn.url, leases=shard.leases)
        await self._residency.isolate(shard, exn)
        return True

    async def until_lost(self) -> None:
        """Return once the cache folder has been found deleted along with its parent folder."""
        await self.until(lambda: self._store.folder.is_lost)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds, which is tried after each check that had a result."""
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
            has_result = await self._check_now()
            if not has_result:
                await asyncio.sleep(_CHECK_S)
                self._suspicion.set()  # callers of `examine` get the result of the next check

    async def _check_now(self) -> bool:
        """Check the disk; if the folder has changed, bring the daemon's state up to date.

        Return False if the check had no result.
        """
        is_suspected = self._suspicion.is_set() or self.error is not None
        self._suspicion.clear()
        self._is_checking = True
        try:
            if is_suspected:
                is_recreated = await self._probe()
            else:
                is_recreated = await self._run_timed(self._store.folder.probe_without_writing)
            # No-op unless the catalogue's file is gone with the folder, or could not be opened.
            await asyncio.to_thread(self._store.catalogue.reopen)
            # Nobody has looked at the folder while the disk failed.
            if is_recreated or self.error is not None:
                await reconcile(self._store, self._residency, self._pins)
            await self._residency.keep_free()
        except DiskError as exn:
            self._record(exn)
        except ExhaustedError as exn:
            # A lack of memory or descriptors says nothing about the disk.
            log.warning("cannot check the cache disk", cause=exn.message)
            return False
        else:
            self._record(None)
        finally:
            self._is_checking = False
        return True

    async def _probe(self) -> bool:
        """Check the disk by writing; return whether the folder was recreated. Raises DiskError."""
        try:
            return await self._run_timed(self._store.folder.probe)
        except DiskFullError:
            # Other programs have filled the disk. Evict shards to make space for them, and check
            # the disk again.
            await self._residency.keep_free()
        return await self._run_timed(self._store.folder.probe)

    async def _run_timed(self, check: Callable[[], bool]) -> bool:
        """Run a check in a thread, and return its result.

        `to_json` reports how long the check has been running.
        """
        self._check_began_s = time.monotonic()
        try:
            return await asyncio.to_thread(check)
        finally:
            self._check_began_s = None

    def _record(self, error: DiskError | None) -> None:
        """Record the result of a check; log a change of the disk's state, and wake waiting tasks.

        Args:
            error: the disk's error; None if it is healthy.
        """
        previous = self.error
        self.error = error
        self._checked.notify()
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
