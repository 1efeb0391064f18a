"""Transfers in progress: one per shard, for all who ask for it."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from shardcache.cache.fetching.retry_gate import RetryGate
from shardcache.cache.planner import Planner
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import Class, JobKey, PostponedError, Wait
from shardcache.errors import (
    CapacityError,
    CorruptShardError,
    DiskFullError,
    OriginUnavailableError,
    ShardcacheError,
    ShardError,
    internal_error,
)
from shardcache.shared.protocol import ShardRef
from shardcache.store.part_file import PartFile
from shardcache.store.shard import Shard
from shardcache.telemetry.logs import about
from shardcache.telemetry.metrics import Counters

log = structlog.get_logger()

_Early = TypeVar("_Early", Arrival, PartFile)

_MAX_REFUSALS = 100  # latest errors that are kept, for people to read


class Transfers:
    """Transfers in progress, by shard name.

    They belong to the cache and outlive the request that started them.

    Args:
        fetch: fetches and returns a shard, or fetches wanted ranges of it and returns None; raises
            the shard's errors, or PostponedError.
        reconsider: called when a transfer has become more urgent.
        changed: notified when a transfer has ended.
        group: runs the transfers.

    Attributes:
        failures: shards that are not worth prefetching for now.
        refusals: the errors of shards that were refused, by url, latest last; until the shard is
            served.
    """

    def __init__(
        self,
        fetch: Callable[[Transfer], Awaitable[Shard | None]],
        reconsider: Callable[[], None],
        planner: Planner,
        counters: Counters,
        changed: Signal,
        group: asyncio.TaskGroup,
    ) -> None:
        self.failures = RetryGate()
        self.refusals: dict[str, ShardError] = {}
        self._fetch = fetch
        self._reconsider = reconsider
        self._planner = planner
        self._counters = counters
        self._measures = counters.measures
        self._changed = changed
        self._group = group
        self._by_name: dict[str, Transfer] = {}
        self._is_hurrying = False

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Transfer | None:
        """Return the transfer of a shard, if there is one."""
        return self._by_name.get(name)

    def all(self) -> list[Transfer]:
        """Return every transfer, oldest first."""
        return list(self._by_name.values())

    async def wait(self, name: str, ref: ShardRef, wanted: Class, wait: Wait) -> Shard | Arrival:
        """Join the shard's transfer or start it; return the shard.

        Returns early access to it if `wait` accepts that: the caller is then one of its readers.
        Cancelling the caller does not cancel the transfer: others may wait for it, now or later.
        Raises the transfer's error; a caller that joined a running transfer gets a new attempt
        first if the error is retryable, or the transfer was by another signature.
        """
        wait.is_file = ref.is_file

        def start() -> Transfer:
            return self.start(name, ref, wanted, wait.client)

        return await self._join(name, ref.url, start, _early_access, wait)

    async def wait_for_range(self, name: str, ref: ShardRef, wait: Wait) -> Shard | PartFile:
        """Return a file with the bytes that a wait needs: some of its parts, or the whole object.

        The caller retains the parts before the next await. Raises as `wait` does.
        """
        assert wait.bytes is not None
        wait.is_file = True

        def start() -> Transfer:
            return self.start(name, ref, Class.PLANNED, wait.client, is_whole=False)

        return await self._join(name, ref.url, start, _needed_parts, wait)

    def _url_of(self, name: str) -> str | None:
        """Return the url by which a shard is being fetched; None if it is not."""
        transfer = self._by_name.get(name)
        return None if transfer is None else transfer.ref.url

    async def _join(
        self,
        name: str,
        url: str,
        start: Callable[[], Transfer],
        available: Callable[[Transfer, Wait], _Early | None],
        wait: Wait,
    ) -> Shard | _Early:
        """Wait for a transfer, and return its shard, or what is available of it before.

        Args:
            url: of the caller; a running transfer may be by another signature.
            start: starts the transfer, or joins the running one.
            available: returns what the wait may have of an unfinished transfer.
        """
        joined_url = self._url_of(name)
        while True:
            transfer = start()
            try:
                access = await self._wait(transfer, available, wait)
            except ShardcacheError as exn:
                if _concerns_others(exn, transfer, wait):
                    continue
                was_joined = joined_url is not None
                may_try_again = exn.retryable or joined_url != url
                if not (was_joined and may_try_again):
                    raise
                joined_url = None  # the next attempt is the caller's own
                continue
            if access is not None:
                return access
            # The transfer had ended with the ranges that others wanted: start another.

    async def _wait(
        self,
        transfer: Transfer,
        available: Callable[[Transfer, Wait], _Early | None],
        wait: Wait,
    ) -> Shard | _Early | None:
        """Wait for a transfer's shard, or for what is available of it before.

        None if the transfer has ended with the ranges that others wanted. Raises its error.
        """
        transfer.waits.add(wait)
        wait.error = None
        wait.stages = transfer.stages
        wait.has_own_stages = False
        if wait.bytes is not None:
            self.hurry(transfer)  # it fetches no other ranges than those of its waits
        try:
            while not transfer.outcome.done():
                early = available(transfer, wait)
                if early is not None:
                    return early
                if wait.error is not None:
                    raise wait.error
                await transfer.moved.wait()
            return transfer.outcome.result()
        finally:
            transfer.waits.discard(wait)
            if wait.ended is not None:
                wait.ended()

    def start(
        self,
        name: str,
        ref: ShardRef,
        wanted: Class,
        client: JobKey | None = None,
        *,
        is_whole: bool = True,
    ) -> Transfer:
        """Start a transfer, or make the running one at least as urgent as `wanted`.

        Args:
            client: the job to which a new transfer is charged.
            is_whole: whether all of the object is wanted, and not only what readers wait for.
        """
        transfer = self._by_name.get(name)
        if transfer is None:
            transfer = Transfer(name, ref, wanted, is_whole=is_whole)
            self._by_name[name] = transfer
            transfer.outcome.add_done_callback(_retrieve_error)
            with about(shard=ref.url):
                transfer.task = self._group.create_task(
                    self._run(transfer, client),
                    name=f"fetch {ref.url}",
                )
        transfer.wanted = min(transfer.wanted, wanted)
        if is_whole:
            transfer.want_whole()
        if not ref.is_file:  # samples are wanted if anybody wants them
            transfer.ref = ref
        return transfer

    def hurry(self, transfer: Transfer) -> None:
        """Re-evaluate priorities now: a reader waits for this shard."""
        transfer.moved.notify()
        if not self._is_hurrying:  # many readers may begin to wait at the same moment
            self._is_hurrying = True
            asyncio.get_running_loop().call_soon(self._hurry)

    def _hurry(self) -> None:
        self._is_hurrying = False
        self._reconsider()

    def stop(self) -> None:
        """Cancel all transfers."""
        for transfer in self.all():
            if transfer.task is not None:
                transfer.task.cancel()

    async def _run(self, transfer: Transfer, client: JobKey | None) -> None:
        """Fetch a shard, and set the outcome of its transfer, whatever happens."""
        is_postponed = False
        try:
            log.debug("fetching", wanted=transfer.klass.name.lower())
            with self._counters.bills.charged(transfer.ref.url, client):
                shard = await self._fetch(transfer)
            log.debug("fetched", size_bytes=None if shard is None else shard.size_bytes)
            for name in self.failures.succeeded(transfer.name):
                self._planner.now.missed(name)
            self._measure(transfer)
            self.refusals.pop(transfer.ref.url, None)
            if shard is None:
                self._note_unfetched(transfer)
            transfer.outcome.set_result(shard)
        except PostponedError:
            # No notification: nothing has changed that could make another attempt succeed.
            self._planner.now.missed(transfer.name)
            is_postponed = True
        except ShardcacheError as exn:
            self._fail(transfer, exn)
        except Exception as exn:
            # The daemon's top-level guard: one bad shard must not end all jobs.
            log.exception("unexpected error in a transfer")
            self._fail(transfer, internal_error(exn, transfer.ref.url))
        finally:
            del self._by_name[transfer.name]
            if not transfer.outcome.done():
                # Postponed, or the daemon is stopping: waiters still get an answer.
                transfer.outcome.set_exception(
                    OriginUnavailableError("the transfer was cancelled", url=transfer.ref.url),
                )
            transfer.moved.notify()
            if not is_postponed:
                self._changed.notify()

    def _note_unfetched(self, transfer: Transfer) -> None:
        """Note why an object of which ranges were fetched was not fetched as a whole."""
        if isinstance(transfer.given_up, ShardcacheError):
            self._note_failure(transfer, transfer.given_up)
        elif transfer.given_up is not None or transfer.is_whole:  # its plan will ask again
            self._planner.now.missed(transfer.name)

    def _note_failure(self, transfer: Transfer, exn: ShardcacheError) -> None:
        """Count a failure; after several, the shard is not prefetched again."""
        self.failures.failed(transfer.name, exn)
        self._measures.failed[exn.code] += 1

    def _fail(self, transfer: Transfer, exn: ShardcacheError) -> None:
        """End a transfer with an error."""
        self._note_failure(transfer, exn)
        if isinstance(exn, ShardError) and not isinstance(exn, CorruptShardError):
            self._refuse(transfer.ref.url, exn)
        if not transfer.waits:
            log.warning("prefetch failed", cause=exn.message)
        transfer.outcome.set_exception(exn)

    def _refuse(self, url: str, exn: ShardError) -> None:
        """Keep the error of a refused shard among `refusals`."""
        self._counters.refused += 1
        self.refusals.pop(url, None)
        self.refusals[url] = exn
        if len(self.refusals) > _MAX_REFUSALS:
            oldest = next(iter(self.refusals))
            del self.refusals[oldest]

    def _measure(self, transfer: Transfer) -> None:
        """Record how long a transfer took, by stage."""
        took_s = transfer.stages.spent_s(-math.inf, time.monotonic())
        if Stage.DISK not in took_s:
            return  # the shard was cached already, which shows no transfer's duration
        self._measures.transfer.observe(sum(took_s.values()))
        for stage, spent_s in took_s.items():
            self._measures.stage.of(stage.name.lower()).observe(spent_s)


def _concerns_others(exn: ShardcacheError, transfer: Transfer, wait: Wait) -> bool:
    """Return whether an error concerns only those who want the whole object, for lack of space.

    The wait is for a range, which may be fetched by itself.
    """
    if wait.bytes is None or exn is wait.error:
        return False
    is_of_whole = transfer.is_whole and transfer.is_divisible
    return is_of_whole and isinstance(exn, (CapacityError, DiskFullError))


def _early_access(transfer: Transfer, wait: Wait) -> Arrival | None:
    """Return early access to a shard, with a waiting reader as one of its readers."""
    arrival = transfer.arriving
    is_waiting = wait.since_s is not None
    if not is_waiting or arrival is None or not arrival.is_worth(wait):
        return None
    arrival.readers.append(wait.client)
    arrival.is_file |= wait.is_file
    return arrival


def _needed_parts(transfer: Transfer, wait: Wait) -> PartFile | None:
    """Return the file of parts once it has those that a wait needs."""
    assert wait.first_bytes is not None
    file = transfer.part_file
    if file is None or not file.has(wait.first_bytes):
        return None
    # A file that has arrived whole loses its name before the transfer ends.
    is_readable = file.is_own or file.partial.is_there()
    return file if is_readable else None


def _retrieve_error(outcome: asyncio.Future[Shard | None]) -> None:
    """Take note of a failed prefetch's error: nothing awaits it, and it has been logged."""
    if not outcome.cancelled():
        outcome.exception()
