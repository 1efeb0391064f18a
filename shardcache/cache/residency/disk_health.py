"""Health monitor of the cache disk: checks it periodically, right after an error, and with backoff while it fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from shardcache.cache.signal import Signal
from shardcache.errors import DiskError, DiskFullError, ExhaustedError
from shardcache.store.folder import CacheFolder

log = structlog.get_logger()

_LOOK_S = 5.0
# A full disk recovers soon, a failing one rarely: backing off keeps its kernel log from filling up.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class Keeper(Protocol):
    """Component that keeps the cache consistent with its disk; its methods raise DiskError."""

    async def make_room(self) -> None:
        """Free space on a full disk by evicting."""

    async def settle(self, was_away: bool) -> None:
        """Update the cache's state: the disk is healthy. `was_away`: the disk was replaced, or failed before."""


class Health:
    """Health of one cache folder's disk.

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

    async def run(self, keeper: Keeper) -> None:
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
            await self._look(keeper)

    async def _look(self, keeper: Keeper) -> None:
        suspected = self._suspicion.is_set() or self.error is not None
        self._suspicion.clear()
        self._looking = True
        try:
            changed = await (self._probe(keeper) if suspected else self._ask(self._folder.look))
            await keeper.settle(changed or self.error is not None)
        except DiskError as exn:
            self._turn(exn)
        except ExhaustedError as exn:  # says nothing about the disk
            log.warning("cannot check the cache disk", cause=exn.message)
        else:
            self._turn(None)
        finally:
            self._looking = False
            self._looked.notify()

    async def _probe(self, keeper: Keeper) -> bool:
        try:
            return await self._ask(self._folder.probe)
        except DiskFullError:
            await keeper.make_room()
        return await self._ask(self._folder.probe)

    async def _ask(self, question: Callable[[], bool]) -> bool:
        self._asked_s = time.monotonic()
        try:
            return await asyncio.to_thread(question)
        finally:
            self._asked_s = None

    def _turn(self, error: DiskError | None) -> None:
        former, self.error = self.error, error
        if type(former) is type(error):
            return
        self._changed.notify()
        lasted_s, self._since_s = time.monotonic() - self._since_s, time.monotonic()
        if error is None:
            log.warning("cache disk has recovered", after_s=round(lasted_s, 1))
        else:
            log.error("cache disk error; serving cached shards only", cause=error.message, remedy=error.remedy)
