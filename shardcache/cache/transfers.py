"""Shards for readers: found in the cache, or transferred into it, once for all who ask, or ahead of need."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

import structlog

from shardcache.cache.disk import Health
from shardcache.cache.planner import History, Revalidation, name_of
from shardcache.cache.residency import LOOK_AGAIN_S, Residency
from shardcache.cache.waits import Arrival, Class, JobKey, PostponedError, Stage, Transfer, Wait
from shardcache.errors import (
    CorruptShardError,
    OriginUnavailableError,
    OutdatedError,
    ShardcacheError,
    ShardError,
    internal_error,
)
from shardcache.logs import about
from shardcache.protocol import ShardRef
from shardcache.store.keys import shard_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import footprint_bytes

log = structlog.get_logger()

# A shard that fails this often, while others succeed, is not prefetched again; it is fetched when a reader asks.
_TRIES_AHEAD = 3
# Number of failed shards remembered; a forgotten one is prefetched again.
_REMEMBERED = 100_000
_MAX_REFUSALS = 100  # the latest, for people to read
_RECALLED_AT_ONCE = 1_000  # urls looked up at a time: larger batches would block the event loop


class RetryGate:
    """Shards whose transfer failed, by name. A reader's own request always gets a fresh attempt."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._tries: dict[str, int] = {}
        self._waiting: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._waiting or self._tries.get(name, 0) >= _TRIES_AHEAD

    def __len__(self) -> int:
        return len(self._tries)

    def failed(self, name: str, exn: ShardcacheError) -> None:
        """Note a failure. A retryable one blocks the shard until another transfer succeeds."""
        tries = self._tries.pop(name, 0)
        self._tries[name] = tries + 1 if exn.retryable else _TRIES_AHEAD
        self._waiting.add(name)
        if len(self._tries) > self._remembered:
            oldest = next(iter(self._tries))
            del self._tries[oldest]
            self._waiting.discard(oldest)

    def succeeded(self, name: str) -> set[str]:
        """Note a success, which shows that the origin answers; return the names worth retrying."""
        self._tries.pop(name, None)
        again = {other for other in self._waiting if self._tries.get(other, 0) < _TRIES_AHEAD}
        self._waiting.clear()
        return again - {name}


@dataclass(eq=False, repr=False)
class Transfers:
    """Transfers in progress, by shard name. They belong to the cache and outlive the request that started them."""

    _fetch: Callable[[Transfer], Awaitable[Shard]]
    _reconsider: Callable[[], None]  # called when a transfer has become more urgent
    _residency: Residency
    _group: asyncio.TaskGroup
    _by_name: dict[str, Transfer] = field(default_factory=dict, init=False)
    failures: RetryGate = field(default_factory=RetryGate, init=False)  # shards not worth prefetching for now
    refusals: dict[str, ShardError] = field(default_factory=dict, init=False)  # by url, until it is served; latest last

    def __post_init__(self) -> None:
        self._planner, self._changed = self._residency.planner, self._residency.changed
        self._counters = self._residency.counters
        self._measures, self._clients = self._counters.measures, self._counters.bills.clients

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
        joined, wait.is_file = name in self._by_name, ref.is_file
        try:
            return await self._wait(self.start(name, ref, wanted, wait.client), wait)
        except ShardcacheError as exn:
            if not (joined and exn.retryable):
                raise
        return await self._wait(self.start(name, ref, wanted, wait.client), wait)

    async def _wait(self, transfer: Transfer, wait: Wait) -> Shard | Arrival:
        transfer.waits.add(wait)
        wait.stages = transfer.stages
        try:
            while not transfer.outcome.done():
                beginning = transfer.arriving
                if wait.since_s is not None and beginning is not None and beginning.is_worth(wait):
                    beginning.readers.append(wait.client)
                    beginning.is_file |= wait.is_file
                    return beginning
                await transfer.moved.wait()
            return transfer.outcome.result()
        finally:
            transfer.waits.discard(wait)

    def start(self, name: str, ref: ShardRef, wanted: Class, client: JobKey | None = None) -> Transfer:
        """Start a transfer, which is charged to `client`, or make the running one at least as urgent as `wanted`."""
        transfer = self._by_name.get(name)
        if transfer is None:
            transfer = self._by_name[name] = Transfer(name, ref, wanted)
            self._clients[ref.url] = client
            # Nothing awaits a failed prefetch; its error has been logged already.
            transfer.outcome.add_done_callback(lambda outcome: outcome.cancelled() or outcome.exception())
            with about(shard=ref.url):
                transfer.task = self._group.create_task(self._run(transfer), name=f"fetch {ref.url}")
        transfer.wanted = min(transfer.wanted, wanted)
        transfer.ref = transfer.ref if ref.is_file else ref  # samples are wanted if anybody wants them
        return transfer

    def hurry(self, transfer: Transfer) -> None:
        """Re-evaluate priorities now: a reader waits for this shard."""
        transfer.moved.notify()
        self._reconsider()

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
            self._measure(transfer)
            self.refusals.pop(transfer.ref.url, None)
            transfer.outcome.set_result(shard)
        except PostponedError:
            # No notification: nothing has changed that could make another attempt succeed.
            self._planner.now.missed(transfer.name)
            postponed = True
        except ShardcacheError as exn:
            self._fail(transfer, exn)
        except Exception as exn:  # the daemon's top-level guard: one bad shard must not end all jobs
            log.exception("unexpected error in a transfer")
            self._fail(transfer, internal_error(exn, transfer.ref.url))
        finally:
            del self._by_name[transfer.name]
            self._clients.pop(transfer.ref.url, None)
            if not transfer.outcome.done():  # postponed, or the daemon is stopping: waiters still get an answer
                transfer.outcome.set_exception(OriginUnavailableError("transfer was cancelled", url=transfer.ref.url))
            transfer.moved.notify()
            if not postponed:
                self._changed.notify()

    def _fail(self, transfer: Transfer, exn: ShardcacheError) -> None:
        self.failures.failed(transfer.name, exn)
        self._measures.failed[exn.code] += 1
        if isinstance(exn, ShardError) and not isinstance(exn, CorruptShardError):
            self._refuse(transfer.ref.url, exn)
        if not transfer.waits:
            log.warning("prefetch failed", cause=exn.message)
        transfer.outcome.set_exception(exn)

    def _refuse(self, url: str, exn: ShardError) -> None:
        self._counters.refused += 1
        self.refusals.pop(url, None)
        self.refusals[url] = exn
        if len(self.refusals) > _MAX_REFUSALS:
            del self.refusals[next(iter(self.refusals))]

    def _measure(self, transfer: Transfer) -> None:
        took_s = transfer.stages.spent_s(-math.inf, time.monotonic())
        if Stage.DISK in took_s:  # an already cached shard says nothing about how long a transfer takes
            self._measures.transfer.observe(sum(took_s.values()))
            for stage, spent_s in took_s.items():
                self._measures.stage.of(stage.name.lower()).observe(spent_s)


class Prefetcher:
    """Turns the plan into transfers: of the shards needed soonest, while there is space and a free slot."""

    def __init__(self, health: Health, transfers: Transfers, max_transfers: int) -> None:
        self._health = health
        self._residency = health.residency
        self._planner = health.residency.planner
        self._transfers = transfers
        self._max_transfers = max_transfers

    async def run(self) -> None:
        """Start transfers whenever plans, transfers or space change, or a shard becomes due; runs until cancelled."""
        while True:
            try:
                pause_s = self._start_all()
            except ShardcacheError as exn:  # the cache disk failed: each reader gets its own error
                log.error("cannot prefetch", cause=exn.message)
                pause_s = None
            await self._residency.changed.wait(pause_s)

    def _start_all(self) -> float | None:
        """Start what can be started now; return when to try again: some changes come without a notification."""
        while sum(map(self._is_ahead, self._transfers.all())) < self._max_transfers:
            now = self._planner.now
            missing = now.next_missing(self.is_cared_for)
            if missing is None:
                return None
            name, needed_at_s, reader, position = missing
            ref = reader.ref(position)
            size_bytes = self._planner.size_bytes(name) or ref.size_bytes
            # Shards needed later than the soonest missing one have even less claim to the space.
            if size_bytes is not None and self._must_wait(footprint_bytes(size_bytes), needed_at_s):
                early_s = needed_at_s - now.now_s - self._planner.lead_s
                return min(early_s, LOOK_AGAIN_S) if early_s > 0 else LOOK_AGAIN_S
            job, uid = client = reader.client
            with about(job=job, uid=uid):
                self._transfers.start(name, ref, Class.PLANNED, client)
        return LOOK_AGAIN_S

    def _must_wait(self, size_bytes: int, needed_at_s: float) -> bool:
        """Return whether there is no space now. A shard that can never fit is started, so that it fails early."""
        if not self._residency.may_fit(size_bytes):
            return False
        return self._health.error is not None or not self._residency.could_fit(size_bytes, needed_at_s)

    @staticmethod
    def _is_ahead(transfer: Transfer) -> bool:
        return transfer.wanted is Class.PLANNED and not transfer.waits

    def is_cared_for(self, name: str) -> bool:
        """Return whether a shard needs no prefetch: it is cached, being fetched, or blocked after failures."""
        is_cached = self._planner.key(name) in self._residency.store.shards
        return is_cached or name in self._transfers or name in self._transfers.failures


@dataclass(frozen=True, slots=True)
class Published:
    """A cached shard, to be retained before the next await. `hit`: it did not have to be fetched."""

    shard: Shard
    facts: Facts
    hit: bool


class Leasing:
    """Finds or fetches the published file of a planned shard."""

    def __init__(self, transfers: Transfers, health: Health, history: History, revalidation: Revalidation) -> None:
        self.residency = health.residency
        self.transfers = transfers
        self.history = history
        self.store = health.residency.store
        self._planner = health.residency.planner
        self._revalidation = revalidation
        self._health = health
        self._examining = asyncio.Lock()

    async def recall(self, urls: Iterable[str]) -> None:
        """Restore the versions of bare urls cached before the last restart; `acquire` revalidates them."""
        unknown = [url for url in urls if self._planner.key(url) == url]
        for first in range(0, len(unknown), _RECALLED_AT_ONCE):
            urls = unknown[first : first + _RECALLED_AT_ONCE]
            for url, version in zip(urls, await self.history.versions(urls), strict=True):
                if version is not None and shard_key(url, version) in self.store.shards:
                    self._planner.learn(url, shard_key(url, version), now_s=float("-inf"))

    async def acquire(self, ref: ShardRef, wanted: Class, wait: Wait) -> Published | Arrival:
        """Return the published shard, fetched if it is missing, or early access to it if `wait` accepts that."""
        name = name_of(ref)
        shard = await self._present(name, ref)
        hit = shard is not None
        while True:
            if shard is None:
                found = await self.transfers.wait(name, ref, wanted, wait)
                if isinstance(found, Arrival):
                    return found
                # The published shard may have been evicted before this task runs: check again.
                shard = self.store.shards.get(found.key)
            elif (facts := await self._facts(shard, ref.url)) and self.store.shards.get(shard.key) is shard:
                if ref.version not in (None, facts.version):  # plans that may read another version share its name
                    raise OutdatedError(
                        f"the origin has version {facts.version}, the manifest names {ref.version}", url=ref.url
                    )
                if facts.samples is None and not ref.is_file:
                    shard = None  # it was fetched as a plain file: the transfer indexes it
                    continue
                if hit:
                    self._planner.now.found(shard.key)
                return Published(shard, facts, hit)
            else:
                shard, hit = None, False

    async def acquire_latest(self, ref: ShardRef, wanted: Class, wait: Wait) -> Published | Arrival:
        """Return the present version of a shard as `acquire` does; the plans that name the other one then mean it."""
        found = await self.acquire(ref._replace(version=None), wanted, wait)
        key = found.shard.key if isinstance(found, Published) else found.partial.key
        self._planner.learn(name_of(ref), key, time.monotonic())
        return found

    @contextlib.asynccontextmanager
    async def published(self, ref: ShardRef) -> AsyncIterator[Published]:
        """Provide a shard, fetched if it is missing, and keep it during the block. Raises as `acquire` does."""
        found = await self.acquire(ref, Class.WARM, Wait())
        assert isinstance(found, Published)  # this wait does not accept a partial shard
        self.residency.retain(found.shard)
        try:
            yield found
        finally:
            await self.release(found.shard)

    async def release(self, shard: Shard) -> None:
        """Release a retained shard and record this as the time of its last use."""
        self.store.touch(shard)
        self.residency.release(shard)
        if not shard.leases:
            await self.store.remember_use(shard)

    async def _facts(self, shard: Shard, url: str) -> Facts | None:
        """Return the facts of a cached shard; None if it is damaged. Raises DiskError if the disk has failed."""
        with self.residency.retained(shard):
            try:
                if self.store.is_suspect(shard):
                    await self._examine(shard, url)
                fresh = shard.facts is None
                facts = await self.store.facts(shard)
                if fresh:
                    await self.history.remember(facts)
            except CorruptShardError as exn:
                await self._check_disk(url)
                shard.damage = exn
                await self.residency.isolate(shard, exn)
                return None
            self.store.touch(shard)
            return facts

    async def _examine(self, shard: Shard, url: str) -> None:
        """Check a shard in which a reader found damage. Raises CorruptShardError, or DiskError.

        If its index alone is damaged, it is a file from then on, which whoever wants samples has indexed again.
        """
        async with self._examining:  # one at a time, and once for all readers that found the same
            if not self.store.is_suspect(shard) or self.store.shards.get(shard.key) is not shard:
                return
            facts = await self.store.facts(shard)
            if facts.samples is None or await self._has_index(shard, facts):
                log.warning("checking a shard that a reader found damaged", shard=url, cause=shard.suspicion)
                await self.store.check_tar(shard, facts)
            shard.suspicion = ""

    async def _has_index(self, shard: Shard, facts: Facts) -> bool:
        try:
            await self.store.check_index(shard, facts)
        except CorruptShardError as exn:
            await self._check_disk(facts.url)
            log.error("the index of a cached shard is damaged; making it again", shard=facts.url, cause=exn.message)
            self.residency.counters.corrupt += 1
            shard.facts = replace(facts, samples=None)
            return False
        return True

    async def _check_disk(self, url: str) -> None:
        """Raise DiskError if the disk has failed, which proves nothing about its shards."""
        await self._health.examine()
        self._health.check(url)

    async def _present(self, name: str, ref: ShardRef) -> Shard | None:
        """Return the shard if it is cached; if no version is given, the origin's last known one."""
        if ref.version is None:
            await self._revalidation.check(name, ref)
        return self.store.shards.get(self._planner.key(name))
