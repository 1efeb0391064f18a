"""Shards on their way into the cache: one transfer for a shard, however many ask for it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from shardcache.cache.failures import Failures
from shardcache.cache.signal import Signal
from shardcache.errors import OriginUnavailableError, ShardcacheError
from shardcache.plan.timeline import Timeline
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard

log = structlog.get_logger()


class Class(enum.IntEnum):
    """How urgent a transfer is; a lower one goes first wherever there is a queue."""

    WAITING = 0  # a reader has nothing else to read
    NEXT = 1  # a reader will want it after the shard in its hands
    PLANNED = 2
    WARM = 3


class Stage(enum.StrEnum):
    """What a transfer is at, in words for people."""

    ASKING = "asking the store for its version"
    SPACE = "waiting for space in the cache"
    NETWORK = "downloading from the store"
    DISK = "checking and indexing"


class PostponedError(Exception):
    """There is no room for a shard that nobody waits for; its plan will bring it up again."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One shard's way from store to cache.

    Attributes:
        name: what plans call the shard.
        klass: the most urgent of those that asked for it.
        waiters: readers that wait for it now.
        done_bytes: bytes that are on disk already, of `total_bytes` (None until the store said).
    """

    name: str
    ref: ShardRef
    klass: Class
    stage: Stage = Stage.ASKING
    waiters: int = 0
    done_bytes: int = 0
    total_bytes: int | None = None
    outcome: asyncio.Future[Shard] = field(default_factory=asyncio.Future, repr=False)
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def set_done(self, done_bytes: int) -> None:
        """Take the download's progress."""
        self.done_bytes = done_bytes

    def to_json(self) -> dict[str, Any]:
        """Return what `shardcache status` shows of it."""
        return {
            "url": self.ref.url,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "class": self.klass.name.lower(),
            "stage": self.stage.value,
            "waiters": self.waiters,
        }


class Transfers:
    """The transfers under way, by the shard's name. They belong to the cache and outlive whoever asked first."""

    def __init__(
        self,
        fetch: Callable[[Transfer], Awaitable[Shard]],
        timeline: Timeline,
        changed: Signal,
        group: asyncio.TaskGroup,
    ) -> None:
        self._fetch = fetch
        self._timeline = timeline
        self._changed = changed
        self._group = group
        self._by_name: dict[str, Transfer] = {}
        self.failures = Failures()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Transfer | None:
        """Return the transfer of a shard, if there is one."""
        return self._by_name.get(name)

    def all(self) -> list[Transfer]:
        """Return every transfer, oldest first."""
        return list(self._by_name.values())

    async def wait(self, name: str, ref: ShardRef, klass: Class) -> Shard:
        """Join the shard's transfer or start it, and return the shard.

        Cancelling the caller leaves the transfer alone: others may wait for it, now or later.
        Raises what the transfer raised; but who joins late gets tries of its own where a retry may help.
        """
        joined = name in self._by_name
        try:
            return await self._wait(self.start(name, ref, klass))
        except ShardcacheError as exn:
            if not (joined and exn.retryable):
                raise
        return await self._wait(self.start(name, ref, klass))

    async def _wait(self, transfer: Transfer) -> Shard:
        transfer.waiters += 1
        try:
            return await asyncio.shield(transfer.outcome)
        finally:
            transfer.waiters -= 1

    def start(self, name: str, ref: ShardRef, klass: Class) -> Transfer:
        """Start a transfer, or make the one under way at least as urgent as `klass`."""
        transfer = self._by_name.get(name)
        if transfer is None:
            transfer = self._by_name[name] = Transfer(name, ref, klass)
            transfer.outcome.add_done_callback(_retrieve)
            transfer.task = self._group.create_task(self._run(transfer), name=f"fetch {ref.url}")
        transfer.klass = min(transfer.klass, klass)
        return transfer

    def stop(self) -> None:
        """Cancel all of them."""
        for transfer in self.all():
            if transfer.task is not None:
                transfer.task.cancel()

    async def _run(self, transfer: Transfer) -> None:
        postponed = False
        try:
            shard = await self._fetch(transfer)
            for name in self.failures.succeeded(transfer.name):
                self._timeline.evicted(name)
            transfer.outcome.set_result(shard)
        except PostponedError:
            # No word of it to anyone: nothing has changed that could make another try succeed.
            self._timeline.evicted(transfer.name)
            postponed = True
        except ShardcacheError as exn:
            self._fail(transfer, exn)
        except Exception as exn:  # the daemon's top-level guard: one bad shard must not end all jobs
            log.exception("a fetch met a bug", url=transfer.ref.url)
            self._fail(transfer, ShardcacheError(f"the daemon failed: {exn!r}", url=transfer.ref.url))
        finally:
            del self._by_name[transfer.name]
            if not transfer.outcome.done():  # postponed, or the daemon stops: whoever waits is answered all the same
                transfer.outcome.set_exception(OriginUnavailableError("fetching was given up", url=transfer.ref.url))
            if not postponed:
                self._changed.notify()

    def _fail(self, transfer: Transfer, exn: ShardcacheError) -> None:
        self.failures.failed(transfer.name, exn)
        if not transfer.waiters:
            log.warning("could not fetch ahead", url=transfer.ref.url, cause=exn.message)
        transfer.outcome.set_exception(exn)


def _retrieve(outcome: asyncio.Future[Shard]) -> None:
    # A failed prefetch has nobody to await it; its error was logged where it happened.
    if not outcome.cancelled():
        outcome.exception()
