"""Connected readers: their plans, their leases and their waits."""

from __future__ import annotations

import asyncio
import enum
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from shardcache.cache.jobs import Job, Jobs, Loader, WaitClock
from shardcache.cache.leasing import Leasing, Published
from shardcache.cache.loop_turns import Turns
from shardcache.cache.planner import Planned, PlannedShards, name_of
from shardcache.cache.waits import Arrival, Class, JobKey, Stage, Transfer, Wait
from shardcache.errors import CapacityError, ProtocolError, ShardcacheError
from shardcache.metrics import Counters
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard
from shardcache.units import size

_OF_A_PREVIOUS_PLAN = -1

# Memory taken by a position of a plan, and by a shard that no other plan names.
_POSITION_BYTES = 64
_SHARD_BYTES = 512
# More than any reader needs: each is an open file.
_MAX_LEASES = 4096
_FORGOTTEN_AT_ONCE = 1024

# More batches than a loader requests from one worker before it needs another's (`prefetch_factor` defaults to 2).
_BATCHES_AHEAD = 4
# A worker that has neither taken nor released a shard for this long counts as idle.
_STILL_S = 3.0


class LeaseState(enum.Enum):
    """State of a lease.

    A lease granted ahead of need is only an early answer: the plan protects the shard, unless a waiting reader needs
    the space. The reader then finds no file and asks again.
    """

    REQUESTED = enum.auto()
    AWAITED = enum.auto()  # requested, and the reader has nothing else to read
    GRANTED = enum.auto()  # ahead of need
    IN_USE = enum.auto()  # the reader has reached the shard, which is retained from its publication on
    EVICTED = enum.auto()  # before the reader reached it


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's lease on a shard, from its request on.

    Attributes:
        number: id of the request.
        position: position in the reader's plan.
        wait: the reader's wait until the lease is granted.
        granted: the shard, or its download if the lease was granted before its end; None until then.
        task: task waiting for the shard, cancelled if the reader withdraws the request.
    """

    number: int
    position: int
    wait: Wait
    state: LeaseState = LeaseState.REQUESTED
    granted: Shard | Arrival | None = None
    task: asyncio.Task[None] | None = field(default_factory=asyncio.current_task, repr=False)

    @property
    def shard(self) -> Shard | None:
        """The published shard; None until there is one."""
        return self.granted.shard if isinstance(self.granted, Arrival) else self.granted

    @property
    def retained(self) -> Shard | None:
        """The shard, if it is retained for the reader."""
        return self.shard if self.state is LeaseState.IN_USE else None


@dataclass(slots=True, eq=False)
class Reader:
    """One connected reader.

    Attributes:
        loader: the data loader that it is a worker of, if any.
    """

    job: Job
    owner: Readers
    loader: Loader | None = None
    _shards: list[Planned] = field(default_factory=list)  # the shards that the plan names
    _order: array[int] = field(default_factory=lambda: array("I"))  # for each position, an index into `_shards`
    _leases: dict[int, Lease] = field(default_factory=dict)
    _clock: WaitClock = field(init=False)
    _moved_s: float = field(default_factory=time.monotonic)  # when it last took or released a shard

    def __post_init__(self) -> None:
        self._clock = WaitClock(self.job, self.owner.waited)

    # The plan

    @property
    def shard_count(self) -> int:
        """Number of shards that the plan's positions can index."""
        return len(self._shards)

    async def declare(self, reads: int) -> None:
        """Begin a new, empty plan; `reads` is the number of its positions that belong to the present epoch."""
        if any(lease.granted is None for lease in self._leases.values()):
            raise ProtocolError("cannot declare a new plan while lease requests are pending")
        for lease in self._leases.values():
            lease.position = _OF_A_PREVIOUS_PLAN
        self.job.shards_planned += reads
        self.owner.planner.now.declare(self, job=self.job.key)
        await self._forget_plan()

    def planned(self, ref: ShardRef) -> Planned:
        """Return the shared plan entry for a shard."""
        return self.owner.shards.of(ref)

    async def extend(self, shards: Sequence[Planned], order: Sequence[int]) -> None:
        """Extend the plan by shards, and by positions that index into all of its shards.

        Raises CapacityError if this plan, or all plans together, would exceed the memory limit.
        """
        self.owner.check_memory(len(self._shards) + len(shards), len(self._order) + len(order), len(order))
        await self.owner.leasing.recall(planned.ref for planned in shards)
        self._shards += shards
        await self.owner.turns.take(order, self._add_positions)
        self.owner.changed.notify()

    def _add_positions(self, order: Sequence[int]) -> None:
        self._order.extend(order)
        self.owner.positions += len(order)
        self.owner.planner.now.extend(self, [self._shards[index].name for index in order])

    # Leases

    async def lease(self, number: int, position: int, *, partial: bool) -> Lease:
        """Lease the shard at a position of the plan. Raises every error that fetching it can raise."""
        ref = self.ref(position)
        if number in self._leases:
            raise ProtocolError(f"request {number} has already asked for a lease")
        if len(self._leases) >= _MAX_LEASES:
            raise ProtocolError(f"a reader may have at most {_MAX_LEASES} leases")
        wait = Wait(self.job.key, partial=partial, holder=self)
        lease = self._leases[number] = Lease(number, position, wait)
        try:
            found = await self.owner.leasing.acquire(ref, Class.PLANNED, wait)
        finally:
            self._clock.stop(wait)
            self._leases.pop(number, None)
        self._leases[number] = lease
        self._grant(lease, found)
        return lease

    def _grant(self, lease: Lease, found: Published | Arrival) -> None:
        self.owner.count(found)
        self._moved_s = time.monotonic()
        lease.granted = found.shard if isinstance(found, Published) else found
        if lease.state is LeaseState.AWAITED:
            self._use(lease)
        else:
            lease.state = LeaseState.GRANTED

    def need(self, number: int) -> None:
        """Use the shard of a lease from now on; if the lease is not granted yet, count the reader as waiting.

        No-op if the request has failed since.
        """
        lease = self._leases.get(number)
        if lease is None:
            return
        if lease.state is LeaseState.GRANTED:
            self._use(lease)
        elif lease.state is LeaseState.REQUESTED:
            lease.state = LeaseState.AWAITED
            self._stand_still(lease.wait, self.transfer(lease.position))
            self.owner.planner.now.waits(self, lease.position, self._clock.waited_s)
            self.owner.changed.notify()

    def _use(self, lease: Lease) -> None:
        now, found = self.owner.planner.now, lease.granted
        if isinstance(found, Shard):  # it may have been evicted, and perhaps re-fetched, since the grant
            found = self.owner.inventory.retain_cached(found.key)
        if found is None:
            lease.state = LeaseState.EVICTED
            now.waits(self, lease.position, self._clock.waited_s)
        else:
            lease.state, lease.granted = LeaseState.IN_USE, found
            now.reads(self, lease.position, self._clock.waited_s)
        self.owner.changed.notify()

    def _stand_still(self, wait: Wait, transfer: Transfer | None) -> None:
        self._clock.start(wait)
        if transfer is not None:
            self.owner.transfers.hurry(transfer)

    async def more(self, number: int, beyond_bytes: int) -> Lease:
        """Wait until more than `beyond_bytes` of an arriving shard are ready, or all of it; return its lease.

        Raises the transfer's error, which ends the lease.
        """
        lease = self._lease(number)
        arrival = lease.granted
        if not isinstance(arrival, Arrival) or lease.position == _OF_A_PREVIOUS_PLAN:
            raise ProtocolError(f"lease {number} is not on a shard that is still arriving")
        transfer = self.transfer(lease.position)
        stages = None if transfer is None else transfer.stages
        wait = Wait(self.job.key, stages=stages, holder=self)
        self._stand_still(wait, transfer)
        try:
            await arrival.beyond(beyond_bytes, wait)
        except ShardcacheError:
            if self._leases.get(number) is lease:  # not released since, nor its number used again
                del self._leases[number]
                await self._let_go(lease)
            raise
        finally:
            self._clock.stop(wait)
        return lease

    async def release(self, number: int, *, read: bool) -> None:
        """Release a lease, or withdraw the request for one; no-op if it has ended already.

        `read`: the reader has finished the shard, even if it was evicted just after the reader opened it.
        """
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        if lease.granted is None:
            self._clock.stop(lease.wait)
            if lease.task is not None:
                lease.task.cancel()
            return
        if lease.retained is not None or (read and lease.state is not LeaseState.GRANTED):
            self.job.shards_done += 1
            self.owner.planner.now.done(self, lease.position, self._clock.waited_s)
        await self._let_go(lease)

    async def close(self) -> None:
        """Disconnect the reader: end its leases and drop its plan."""
        self.owner.remove(self)
        while self._leases:
            await self._let_go(self._leases.popitem()[1])
        await self._forget_plan()

    async def _forget_plan(self) -> None:
        """Free the plan in small steps; explicitly, as an error's traceback may keep a disconnected reader alive."""
        self.owner.positions -= len(self._order)
        del self._order[:]
        while self._shards:
            del self._shards[-_FORGOTTEN_AT_ONCE:]
            await self.owner.turns.wait()

    async def _let_go(self, lease: Lease) -> None:
        self._moved_s = time.monotonic()
        if lease.retained is not None:
            await self.owner.leasing.release(lease.retained)
        elif isinstance(lease.granted, Arrival):
            lease.granted.leave(self.job.key)

    def position(self, number: int) -> int:
        """Return the plan position of a lease."""
        return self._lease(number).position

    def _lease(self, number: int) -> Lease:
        lease = self._leases.get(number)
        if lease is None or lease.granted is None:
            raise ProtocolError(f"no lease has number {number}")
        return lease

    def ref(self, position: int) -> ShardRef:
        """Return the shard at a position of the plan. Raises ProtocolError if there is no such position."""
        if not 0 <= position < len(self._order):
            raise ProtocolError(f"the plan has no position {position}")
        return self._shards[self._order[position]].ref

    # State

    @property
    def client(self) -> JobKey:
        """The reader's job."""
        return self.job.key

    def leased_shards(self) -> int:
        """Return the number of shards retained for the reader."""
        return len(self._retained())

    def _retained(self) -> list[Shard]:
        return [shard for lease in self._leases.values() if (shard := lease.retained) is not None]

    def kept_waiting(self) -> Collection[Reader]:
        """Return the workers of the same loader that keep their shards until this one gets its own.

        The loader waits for this worker's batch and asks the others for only a few more batches in the meantime: too
        few for them to finish a shard with many samples.
        """
        if self.loader is None:
            return ()
        workers = self.owner.workers.get((self.job.key, self.loader), ())
        return [reader for reader in workers if reader._keeps_for(self.loader)]

    def _keeps_for(self, loader: Loader) -> bool:
        min_samples = loader.batch_size * _BATCHES_AHEAD
        return (
            not self._clock.waits
            and time.monotonic() - self._moved_s > _STILL_S
            and all(shard.facts is not None and shard.facts.samples > min_samples for shard in self._retained())
        )

    def transfer(self, position: int) -> Transfer | None:
        """Return the transfer of the shard at a position, if there is one."""
        return self.owner.transfers.get(name_of(self.ref(position)))

    def charge(self) -> None:
        """Bring its job's waiting times up to date."""
        self._clock.charge()

    @property
    def waiting_for(self) -> Stage | None:
        """Stage of the transfer that the reader waits for; None while it reads."""
        wait = next(iter(self._clock.waits), None)
        return None if wait is None else wait.stages.present if wait.stages else Stage.ASKING


class Readers:
    """All connected readers.

    Attributes:
        workers: those that are DataLoader workers, by job and loader.
    """

    def __init__(self, leasing: Leasing, counters: Counters, turns: Turns, plan_memory_bytes: int) -> None:
        self.leasing = leasing
        self.inventory = leasing.inventory
        self.planner = leasing.inventory.planner
        self.changed = leasing.inventory.changed
        self.transfers = leasing.transfers
        self.turns = turns
        self.waited = counters.measures.wait
        self.shards = PlannedShards()
        self.positions = 0  # in all plans
        self.workers: dict[tuple[JobKey, Loader], set[Reader]] = {}
        self._plan_memory_bytes = plan_memory_bytes
        self.counters = counters
        self._readers: set[Reader] = set()
        self._jobs = Jobs()

    def __iter__(self) -> Iterator[Reader]:
        return iter(self._readers)

    def add(self, job_name: str, uid: int, loader: Loader | None = None) -> Reader:
        """Add a reader to a user's job and return the reader."""
        reader = Reader(self._jobs.join(job_name, uid), self, loader)
        self._readers.add(reader)
        if loader is not None:
            self.workers.setdefault((reader.job.key, loader), set()).add(reader)
        return reader

    def check_memory(self, shards: int, positions: int, added: int) -> None:
        """Raise CapacityError if a plan of this size is too large, alone or with all others; `added` are new."""
        own_bytes = _SHARD_BYTES * shards + _POSITION_BYTES * positions
        all_bytes = _SHARD_BYTES * len(self.shards) + _POSITION_BYTES * (self.positions + added)
        for what, taken_bytes, max_bytes in (
            ("the plan takes", own_bytes, self._plan_memory_bytes // 2),
            ("all plans together take", all_bytes, self._plan_memory_bytes),
        ):
            if taken_bytes > max_bytes:
                raise CapacityError(
                    f"{what} {size(taken_bytes)} of the daemon's memory; the limit is {size(max_bytes)}",
                    remedy="start the daemon with more --plan-memory, or write fewer and larger shards",
                )

    def remove(self, reader: Reader) -> None:
        """Forget a reader and its plan."""
        self._readers.discard(reader)
        reader.job.sessions -= 1
        if reader.loader is not None:
            workers = self.workers[reader.job.key, reader.loader]
            workers.discard(reader)
            if not workers:
                del self.workers[reader.job.key, reader.loader]
        self.planner.now.forget(reader)
        self.changed.notify()

    def count(self, found: Published | Arrival) -> None:
        """Count a lease."""
        if isinstance(found, Published) and found.hit:
            self.counters.hits += 1
            self.counters.hit_bytes += found.facts.size_bytes
        else:
            self.counters.misses += 1

    def jobs(self) -> list[Job]:
        """Return the jobs, oldest first."""
        return list(self._jobs)
