"""Transfers in progress: one per shard, whoever requests it.

`Leasing` joins or starts transfers for callers that wait, `Prefetcher` starts them ahead of need.

- A transfer brings one shard, or ranges of one object, from the origin into the cache. `Fetcher`
  does the work, in a task.
- A caller that joins a transfer adds a `Wait` to it: that says who waits, since when, and whether
  the whole shard is needed or a range of it.
- A transfer that nobody waits for must not wait for space or for the disk: it is postponed instead.
  This is not a failure: the plan requests the shard again.
- A shard's name, here and in plans, stands for its url and for the version that is wanted, if one
  was named; `name_of` makes it.
"""

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
from shardcache.cache.waiting.waits import JobKey, PostponedError, PriorityClass, Wait
from shardcache.shared.exceptions import (
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

_MAX_REFUSALS = 100  # number of the latest errors that are kept for the status page


class Transfers:
    """Transfers in progress, by shard name.

    Transfers belong to the cache, and outlive the requests that started them.

    Args:
        fetch: fetches and returns a shard, or fetches wanted ranges of an object and returns None;
            raises the shard's errors, or PostponedError.
        reconsider: called when a transfer has become more urgent.
        planner: has the schedule, which learns here that a shard has to be fetched again.
        counters: counters of the daemon, among them the bytes charged to each job.
        changed: notified when a transfer has ended.
        group: the task group that runs the transfers.

    Attributes:
        failures: shards that are not worth prefetching for now.
        refusals: the errors of shards that cannot be served, by url, the latest last. An error
            stays until a transfer of its shard succeeds.
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
        self._will_reconsider = False

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Transfer | None:
        """Return the transfer of a shard, if there is one."""
        return self._by_name.get(name)

    def all(self) -> list[Transfer]:
        """Return every transfer, oldest first."""
        return list(self._by_name.values())

    async def wait(
        self,
        name: str,
        ref: ShardRef,
        priority_class: PriorityClass,
        wait: Wait,
    ) -> Shard | Arrival:
        """Join the shard's transfer, or start one; return the shard.

        Returns early access to the shard if `wait` accepts that: the caller then counts as one of
        the readers of the `Arrival`. Cancelling the caller does not cancel the transfer: others may
        wait for it, now or later.

        Raises the transfer's error. If the caller has joined a running transfer that fails, another
        transfer is tried before the error is raised, provided that the error is retryable, or that
        the failed transfer requested another url, such as one with another signature.

        Args:
            name: the shard's name.
            ref: the shard.
            priority_class: class of a new transfer; a running one gets it if it is more urgent.
            wait: the caller's wait.
        """
        wait.is_file = ref.is_file

        def start() -> Transfer:
            return self.start(name, ref, priority_class, wait.client)

        return await self._join(name, ref.url, start, _try_arrival, wait)

    async def wait_for_range(self, name: str, ref: ShardRef, wait: Wait) -> Shard | PartFile:
        """Return a file with the bytes that a wait needs: parts of the object, or all of it.

        The caller has to retain the parts (`PartResidency.retain`) before its next await: until
        then, they may be evicted. Raises as `wait` does.
        """
        assert wait.bytes is not None
        wait.is_file = True

        def start() -> Transfer:
            return self.start(name, ref, PriorityClass.PLANNED, wait.client, is_whole=False)

        return await self._join(name, ref.url, start, _try_parts, wait)

    async def _join(
        self,
        name: str,
        url: str,
        start: Callable[[], Transfer],
        try_early: Callable[[Transfer, Wait], _Early | None],
        wait: Wait,
    ) -> Shard | _Early:
        """Wait for a transfer, and return its shard, or early access to it.

        Args:
            name: the shard's name.
            url: url in the caller's request; a running transfer may use one with another signature.
            start: starts the transfer, or returns the running one.
            try_early: gives the wait early access to an unfinished transfer's shard, if the wait
                accepts what there is; None as long as there is too little.
            wait: the caller's wait.
        """
        running = self._by_name.get(name)
        # The url of a transfer that another caller has started. `start` may change the transfer's.
        running_url = None if running is None else running.ref.url
        while True:
            transfer = start()
            try:
                access = await self._wait_for_access(transfer, try_early, wait)
            except ShardcacheError as exn:
                if _concerns_only_whole(exn, transfer, wait):
                    continue  # the range can still be fetched by itself
                if running_url is None:
                    raise
                # A new transfer requests the caller's url, whose signature the origin may accept.
                may_succeed = exn.retryable or running_url != url
                if not may_succeed:
                    raise
                running_url = None  # the next transfer is this call's own, so its error is raised
                continue
            if access is not None:
                return access
            # The transfer fetched the ranges that others wanted, and ended before this wait joined:
            # start another.

    async def _wait_for_access(
        self,
        transfer: Transfer,
        try_early: Callable[[Transfer, Wait], _Early | None],
        wait: Wait,
    ) -> Shard | _Early | None:
        """Wait for a transfer's shard, or for early access to it; see `_join`.

        None if the transfer has ended after fetching only the ranges that others wanted. Raises the
        error of the transfer, or the one that ends this wait alone.
        """
        transfer.waits.add(wait)
        wait.error = None  # it may be left from an earlier transfer
        # The wait is in the same stage as the transfer, until its range is fetched by itself.
        wait.stages = transfer.stages
        wait.has_own_stages = False
        if wait.bytes is not None:
            # The transfer fetches only ranges that are waited for, so it has to look again now.
            self.wait_began(transfer, wait)
        try:
            while not transfer.outcome.done():
                early = try_early(transfer, wait)
                if early is not None:
                    return early
                if wait.error is not None:
                    raise wait.error
                await transfer.moved.wait_as(wait)
            return transfer.outcome.result()
        finally:
            transfer.waits.discard(wait)
            if wait.on_end is not None:
                wait.on_end()

    def start(
        self,
        name: str,
        ref: ShardRef,
        priority_class: PriorityClass,
        client: JobKey | None = None,
        *,
        is_whole: bool = True,
    ) -> Transfer:
        """Start a transfer, or make the running one at least as urgent as `priority_class`.

        Args:
            name: the shard's name in plans.
            ref: the shard.
            priority_class: class of the request, not counting readers that wait.
            client: the job to which a new transfer's requests and bytes are charged; None if they
                are charged to no job.
            is_whole: whether all of the object is wanted, and not only the ranges that readers
                wait for.
        """
        transfer = self._by_name.get(name)
        if transfer is None:
            transfer = Transfer(name, ref, priority_class, is_whole=is_whole)
            self._by_name[name] = transfer
            transfer.outcome.add_done_callback(_retrieve_error)
            # All log lines of the task name the shard.
            with about(shard=ref.url):
                transfer.task = self._group.create_task(
                    self._run(transfer, client),
                    name=f"fetch {ref.url}",
                )
        transfer.requested_class = min(transfer.requested_class, priority_class)
        if is_whole:
            transfer.want_whole()
        # A shard is indexed if any of its requests is for samples.
        if not ref.is_file:
            transfer.ref = ref
        return transfer

    def wait_began(self, transfer: Transfer, wait: Wait) -> None:
        """Have priorities re-evaluated soon, as a reader has begun to wait for this shard."""
        transfer.moved.notify_unnamed()
        transfer.moved.wake([wait])  # other readers' waits are not concerned
        # Many readers may begin to wait in the same turn of the event loop. Priorities are then
        # re-evaluated once for all of them.
        if not self._will_reconsider:
            self._will_reconsider = True
            asyncio.get_running_loop().call_soon(self._reconsider_priorities)

    def _reconsider_priorities(self) -> None:
        """Have priorities re-evaluated now."""
        self._will_reconsider = False
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
            log.debug("fetching", wanted=transfer.priority_class.name.lower())
            with self._counters.bills.charged(transfer.ref.url, client):
                shard = await self._fetch(transfer)
            log.debug("fetched", size_bytes=None if shard is None else shard.size_bytes)
            # Other shards that had failed are worth another attempt, now that the origin answers.
            for name in self.failures.succeeded(transfer.name):
                self._planner.schedule.missing_again(name)
            self._measure(transfer)
            self.refusals.pop(transfer.ref.url, None)
            if shard is None:
                self._note_unfetched(transfer)
            transfer.outcome.set_result(shard)
        except PostponedError:
            # `_changed` is not notified of this end below: nothing has changed that could make
            # another attempt succeed, and the prefetcher would try at once, again and again.
            self._planner.schedule.missing_again(transfer.name)
            is_postponed = True
        except ShardcacheError as exn:
            self._fail(transfer, exn)
        except Exception as exn:
            # This is a top-level guard of the daemon: one bad shard must not end all jobs.
            log.exception("unexpected error in a transfer")
            self._fail(transfer, internal_error(exn, transfer.ref.url))
        finally:
            del self._by_name[transfer.name]
            if not transfer.outcome.done():
                # The transfer was postponed, or the daemon is stopping. Callers that wait still get
                # an answer.
                transfer.outcome.set_exception(
                    OriginUnavailableError("the transfer was cancelled", url=transfer.ref.url),
                )
            transfer.moved.notify()
            if not is_postponed:
                self._changed.notify()

    def _note_unfetched(self, transfer: Transfer) -> None:
        """Record that a transfer fetched ranges of an object, but not the whole."""
        if isinstance(transfer.give_up_reason, ShardcacheError):
            self._note_failure(transfer, transfer.give_up_reason)
            return
        was_postponed = transfer.give_up_reason is not None
        # Somebody wanted the whole after the transfer had looked for the last time.
        was_wanted_too_late = transfer.is_whole
        if was_postponed or was_wanted_too_late:
            # A plan that needs the whole then requests it again.
            self._planner.schedule.missing_again(transfer.name)

    def _note_failure(self, transfer: Transfer, exn: ShardcacheError) -> None:
        """Count a failed attempt; after several, the shard is not prefetched again."""
        self.failures.failed(transfer.name, exn)
        self._measures.failed[exn.code] += 1

    def _fail(self, transfer: Transfer, exn: ShardcacheError) -> None:
        """End a transfer with an error."""
        self._note_failure(transfer, exn)
        # A corrupt shard may arrive intact the next time, so it does not count as refused.
        if isinstance(exn, ShardError) and not isinstance(exn, CorruptShardError):
            self._refuse(transfer.ref.url, exn)
        if not transfer.waits:
            log.warning("prefetch failed", cause=exn.message)
        transfer.outcome.set_exception(exn)

    def _refuse(self, url: str, exn: ShardError) -> None:
        """Keep the error of a shard that cannot be served among `refusals`."""
        self._counters.refused += 1
        self.refusals.pop(url, None)  # the latest error comes last
        self.refusals[url] = exn
        if len(self.refusals) > _MAX_REFUSALS:
            oldest = next(iter(self.refusals))
            del self.refusals[oldest]

    def _measure(self, transfer: Transfer) -> None:
        """Record the time that a successful transfer spent in each stage."""
        # All stages count, from the beginning of the transfer until now.
        took_s = transfer.stages.spent_s(-math.inf, time.monotonic())
        if Stage.DISK not in took_s:
            return  # nothing was checked or indexed, so this was no transfer of a whole shard
        self._measures.transfer.observe(sum(took_s.values()))
        for stage, spent_s in took_s.items():
            self._measures.stage.of(stage.name.lower()).observe(spent_s)


def _concerns_only_whole(exn: ShardcacheError, transfer: Transfer, wait: Wait) -> bool:
    """Return whether only the whole object lacks space, and a wait needs no more than a range."""
    if wait.bytes is None:
        return False
    if exn is wait.error:  # it is the range that lacks space
        return False
    if not transfer.is_whole or not transfer.is_divisible:
        return False
    return isinstance(exn, (CapacityError, DiskFullError))


def _try_arrival(transfer: Transfer, wait: Wait) -> Arrival | None:
    """Add a wait's reader to the readers of the arriving shard, and return the `Arrival`.

    None if the wait does not accept the shard yet, or its reader still has something else to read.
    """
    arrival = transfer.arriving
    is_idle = wait.idle_since_s is not None
    if not is_idle or arrival is None or not arrival.can_serve(wait):
        return None
    arrival.readers.append(wait.client)
    if wait.is_file:
        arrival.is_file = True
    return arrival


def _try_parts(transfer: Transfer, wait: Wait) -> PartFile | None:
    """Return the file of parts if it has those that a wait needs."""
    assert wait.first_bytes is not None
    file = transfer.part_file
    if file is None or not file.has(wait.first_bytes):
        return None
    # If a transfer of the whole object has taken the file over, the file gets another name when it
    # is published, before the transfer ends. Its old name then leads nowhere.
    if not file.is_kept_by_part and not file.partial.has_file():
        return None
    return file


def _retrieve_error(outcome: asyncio.Future[Shard | None]) -> None:
    """Retrieve a failed transfer's error, so that asyncio does not report it as never retrieved.

    If no caller waits, `Transfers` has logged the error.
    """
    if not outcome.cancelled():
        outcome.exception()
