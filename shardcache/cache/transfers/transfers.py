"""Transfers of shards into the cache: one per shard, shared by everyone who asks for it."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from shardcache.cache.planner import Planner
from shardcache.cache.signal import Signal
from shardcache.cache.transfers.arriving import Arrival
from shardcache.cache.transfers.retry_gate import RetryGate
from shardcache.cache.transfers.waiting import Stage, Stages, Wait
from shardcache.errors import OriginUnavailableError, ShardcacheError
from shardcache.fetch.parts.pausable_read import Coming
from shardcache.logs import about
from shardcache.protocol import ShardRef
from shardcache.redact import redact
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation

log = structlog.get_logger()


class Class(enum.IntEnum):
    """Priority class of a transfer; the lower class goes first in every queue."""

    WAITING = 0  # a reader has nothing else to read
    PLANNED = 1
    WARM = 2


class PostponedError(Exception):
    """Postponed transfer: no space now for a shard that no reader waits for; its plan will request it again."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The fetching of one shard from origin to cache.

    Attributes:
        name: name of the shard in plans.
        wanted: its urgency, not counting waiting readers.
        waits: the present waits for the shard.
        done_bytes: bytes already on disk, of `total_bytes` (None until the origin has reported it).
        coming: bytes received that are not on disk yet.
        arriving: early access to the shard, while it can be offered.
        moved: notified when any of these changes.
    """

    name: str
    ref: ShardRef
    wanted: Class
    waits: set[Wait] = field(default_factory=set)
    stages: Stages = field(default_factory=Stages)
    done_bytes: int = 0
    coming: Coming = field(default_factory=Coming)
    total_bytes: int | None = None
    arriving: Arrival | None = None
    moved: Signal = field(default_factory=Signal)
    outcome: asyncio.Future[Shard] = field(default_factory=asyncio.Future, repr=False)
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def klass(self) -> Class:
        """Present urgency, counting waiting readers."""
        return Class.WAITING if any(wait.since_s is not None for wait in self.waits) else self.wanted

    def longest_wait(self) -> Wait | None:
        """Return the wait of the reader that has waited longest, if any reader waits."""
        waiting = [wait for wait in self.waits if wait.since_s is not None]
        return min(waiting, key=lambda wait: wait.since_s or 0.0, default=None)

    def set_done(self, done_bytes: int) -> None:
        """Record the download's progress."""
        self.done_bytes = done_bytes
        self.moved.notify()

    @property
    def arrived_bytes(self) -> int:
        """Bytes received so far, on disk or not."""
        return self.done_bytes + self.coming.size_bytes

    def rate_bytes_per_s(self) -> float:
        """Return the mean rate of the download; 0 outside the download stage."""
        elapsed_s = time.monotonic() - self.stages.present_since_s
        return self.arrived_bytes / elapsed_s if self.stages.present is Stage.NETWORK and elapsed_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the transfer's entry in `shardcache status`."""
        return {
            "url": redact(self.ref.url),
            "done_bytes": self.arrived_bytes,
            "total_bytes": self.total_bytes,
            "rate_bytes_per_s": round(self.rate_bytes_per_s()),
            "class": self.klass.name.lower(),
            "stage": self.stages.present.value,
            "waiters": len(self.waits),
        }


@dataclass(slots=True, eq=False)
class KeyClaim:
    """All transfers that lead to one key. The holder of the lock does the work, with the highest urgency among them.

    Attributes:
        reservation: the space reserved for the shard.
        wanted_bytes: further space that it waits for; 0 while it does not wait.
        behind: the claim whose turn it waits for.
        waits_since_s: start of the wait, by the monotonic clock.
        checked_s: time of the last deadlock check.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    transfers: list[Transfer] = field(default_factory=list)
    reservation: Reservation | None = None
    wanted_bytes: int = 0
    behind: KeyClaim | None = None
    waits_since_s: float = 0.0
    checked_s: float = -math.inf

    @property
    def is_blocked(self) -> bool:
        """True while only space, for this claim or the one ahead of it, lets it continue."""
        return self.wanted_bytes > 0 or (self.behind is not None and self.behind.is_blocked)

    @property
    def reserved_bytes(self) -> int:
        """Size of the reservation."""
        return self.reservation.size_bytes if self.reservation else 0

    @property
    def waits(self) -> list[Wait]:
        """All waits for the shard."""
        return [wait for transfer in self.transfers for wait in transfer.waits]

    @property
    def reader_waits(self) -> list[Wait]:
        """The waits of readers that have nothing to read."""
        return [wait for wait in self.waits if wait.since_s is not None]

    @contextmanager
    def waiting(self, wanted_bytes: int = 0, behind: KeyClaim | None = None) -> Iterator[None]:
        """Mark the claim as waiting for space, or for another claim's turn to end."""
        former = [(transfer, transfer.stages.present) for transfer in self.transfers] if wanted_bytes else []
        self.wanted_bytes, self.behind, self.waits_since_s = wanted_bytes, behind, time.monotonic()
        for transfer, _ in former:
            transfer.stages.enter(Stage.SPACE)
        try:
            yield
        finally:
            self.wanted_bytes, self.behind = 0, None
            for transfer, stage in former:
                transfer.stages.enter(stage)


class Transfers:
    """Transfers in progress, by shard name. They belong to the cache and outlive the request that started them.

    Args:
        hurry: called when a transfer has become more urgent.
        over: called with each transfer that ends, and its error.
    """

    def __init__(
        self,
        fetch: Callable[[Transfer], Awaitable[Shard]],
        hurry: Callable[[], None],
        planner: Planner,
        changed: Signal,
        group: asyncio.TaskGroup,
        over: Callable[[Transfer, ShardcacheError | None], None],
    ) -> None:
        self._fetch = fetch
        self._hurry = hurry
        self._planner = planner
        self._changed = changed
        self._group = group
        self._over = over
        self._by_name: dict[str, Transfer] = {}
        self.failures = RetryGate()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Transfer | None:
        """Return the transfer of a shard, if there is one."""
        return self._by_name.get(name)

    def all(self) -> list[Transfer]:
        """Return every transfer, oldest first."""
        return list(self._by_name.values())

    async def wait(self, name: str, ref: ShardRef, wanted: Class, wait: Wait) -> Shard | Arrival:
        """Join the shard's transfer or start it; return the shard, or early access to it if `wait` accepts that.

        On early access, the caller is added to its readers. Cancelling the caller does not cancel the transfer: others
        may wait for it, now or later. Raises the transfer's error; a caller that joined a running transfer gets a new
        attempt first if the error is retryable.
        """
        joined = name in self._by_name
        try:
            return await self._wait(self.start(name, ref, wanted), wait)
        except ShardcacheError as exn:
            if not (joined and exn.retryable):
                raise
        return await self._wait(self.start(name, ref, wanted), wait)

    async def _wait(self, transfer: Transfer, wait: Wait) -> Shard | Arrival:
        transfer.waits.add(wait)
        wait.stages = transfer.stages
        try:
            while not transfer.outcome.done():
                beginning = transfer.arriving
                if wait.partial and wait.since_s is not None and beginning is not None and beginning.is_worth_reading:
                    beginning.readers.append(wait.party)
                    return beginning
                await transfer.moved.wait()
            return transfer.outcome.result()
        finally:
            transfer.waits.discard(wait)

    def start(self, name: str, ref: ShardRef, wanted: Class) -> Transfer:
        """Start a transfer, or make the running one at least as urgent as `wanted`."""
        transfer = self._by_name.get(name)
        if transfer is None:
            transfer = self._by_name[name] = Transfer(name, ref, wanted)
            transfer.outcome.add_done_callback(_retrieve)
            with about(shard=ref.url):
                transfer.task = self._group.create_task(self._run(transfer), name=f"fetch {ref.url}")
        transfer.wanted = min(transfer.wanted, wanted)
        return transfer

    def hurry(self, transfer: Transfer) -> None:
        """Re-evaluate priorities now: a reader waits for this shard."""
        transfer.moved.notify()
        self._hurry()

    def stop(self) -> None:
        """Cancel all transfers."""
        for transfer in self.all():
            if transfer.task is not None:
                transfer.task.cancel()

    async def _run(self, transfer: Transfer) -> None:
        postponed = False
        try:
            log.debug("fetching", wanted=transfer.klass.name.lower())
            shard = await self._fetch(transfer)
            log.debug("fetched", size_bytes=shard.size_bytes)
            for name in self.failures.succeeded(transfer.name):
                self._planner.now.missed(name)
            self._over(transfer, None)
            transfer.outcome.set_result(shard)
        except PostponedError:
            # No notification: nothing has changed that could make another attempt succeed.
            self._planner.now.missed(transfer.name)
            postponed = True
        except ShardcacheError as exn:
            self._fail(transfer, exn)
        except Exception as exn:  # the daemon's top-level guard: one bad shard must not end all jobs
            log.exception("unexpected error in a transfer")
            self._fail(transfer, ShardcacheError(f"internal error in the daemon: {exn!r}", url=transfer.ref.url))
        finally:
            del self._by_name[transfer.name]
            if not transfer.outcome.done():  # postponed, or the daemon is stopping: waiters still get an answer
                transfer.outcome.set_exception(OriginUnavailableError("transfer was cancelled", url=transfer.ref.url))
            transfer.moved.notify()
            if not postponed:
                self._changed.notify()

    def _fail(self, transfer: Transfer, exn: ShardcacheError) -> None:
        self.failures.failed(transfer.name, exn)
        self._over(transfer, exn)
        if not transfer.waits:
            log.warning("prefetch failed", cause=exn.message)
        transfer.outcome.set_exception(exn)


def _retrieve(outcome: asyncio.Future[Shard]) -> None:
    # Nothing awaits a failed prefetch; its error has been logged already.
    if not outcome.cancelled():
        outcome.exception()
