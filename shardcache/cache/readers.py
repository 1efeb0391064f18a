"""The reading processes that are connected: their plans, what they have in hand, and how long they have waited."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from shardcache.cache.arriving import Arriving
from shardcache.cache.holds import Holds
from shardcache.cache.jobs import Job, Jobs, Loader, StallClock
from shardcache.cache.leasing import Leasing, Published
from shardcache.cache.names import Names
from shardcache.cache.planned import Planned, PlannedShards
from shardcache.cache.planner import Planner
from shardcache.cache.signal import Signal
from shardcache.cache.transfers import Class, Transfer, Transfers
from shardcache.cache.turns import Turns
from shardcache.cache.waiting import Stage, Wait
from shardcache.errors import CapacityError, ProtocolError, ShardcacheError
from shardcache.metrics import Counters
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard
from shardcache.units import size

_OF_A_FORMER_PLAN = -1

# What a position of a plan takes of memory, and a shard that no other plan names.
_POSITION_BYTES = 64
_SHARD_BYTES = 512
# More than any reader has use for: each is a file that it has open.
_MOST_LEASES = 4096
_FORGOTTEN_AT_ONCE = 1024

# More batches than a loader has of one worker before it takes another's (`prefetch_factor` is 2 by default).
_BATCHES_AHEAD = 4
# A worker that has neither taken nor given back a shard for this long does not do so just now.
_STILL_S = 3.0


@dataclass(slots=True, eq=False)
class Lease:
    """A shard that a reader has asked for.

    Once it is granted and needed, it is in the reader's hands: held, it stays in place. One that is granted before it
    is needed is only an answer given early: the plan keeps it, unless somebody who has nothing to read needs the room;
    the reader then finds no file and asks again.

    Attributes:
        number: the id of the request for it.
        position: in the reader's plan.
        wait: how it is waited for, until it is granted.
        needed: whether the reader has come to it.
        shard: None until it is granted, and while it is still arriving.
        arriving: where it was given out before it was whole.
        held: whether it is in the reader's hands, whole.
        task: what waits for the shard, cancelled when the reader wants it no longer.
    """

    number: int
    position: int
    wait: Wait
    needed: bool = False
    shard: Shard | None = None
    arriving: Arriving | None = None
    held: bool = False
    task: asyncio.Task[None] | None = field(default_factory=asyncio.current_task, repr=False)

    def look(self) -> None:
        """Notice that what was arriving is whole now, and held for this reader."""
        if self.shard is None and self.arriving is not None and self.arriving.shard is not None:
            self.shard, self.held = self.arriving.shard, True


@dataclass(slots=True, eq=False)
class Reader:
    """One connected reading process.

    Attributes:
        loader: of which it is a worker, if it is one.
    """

    job: Job
    owner: Readers
    loader: Loader | None = None
    _shards: list[Planned] = field(default_factory=list)  # the plan's table
    _course: array[int] = field(default_factory=lambda: array("I"))  # for each position, where in that table
    _asked: dict[int, Lease] = field(default_factory=dict)  # those that are waited for
    _leases: dict[int, Lease] = field(default_factory=dict)  # those that were granted
    _clock: StallClock = field(init=False)
    _moved_s: float = field(default_factory=time.monotonic)  # when it last took a shard or gave one back

    def __post_init__(self) -> None:
        self._clock = StallClock(self.job, self.owner.waited)

    # The plan

    @property
    def shard_count(self) -> int:
        """Number of shards that the plan's indices may name."""
        return len(self._shards)

    async def declare(self, reads: int) -> None:
        """Begin a plan, with no shards yet; `reads` of all its positions belong to the present epoch."""
        if self._asked:
            raise ProtocolError("a new plan has to wait for the leases that were asked for")
        for lease in self._leases.values():
            lease.position = _OF_A_FORMER_PLAN
        self.job.shards_planned += reads
        self.owner.planner.now.declare(self, job=self.job.key)
        await self._forget_plan()

    def planned(self, ref: ShardRef) -> Planned:
        """Return the shard as plans name it."""
        return self.owner.shards.of(ref)

    async def extend(self, shards: Sequence[Planned], order: Sequence[int]) -> None:
        """Add to the plan: more shards, and positions that index into all of them.

        Raises CapacityError where this plan, or all plans together, would take more memory than they may.
        """
        self.owner.check_memory(len(self._shards) + len(shards), len(self._course) + len(order), len(order))
        await self.owner.leasing.recall(planned.ref for planned in shards)
        self._shards += shards
        await self.owner.turns.take(order, self._add_positions)
        self.owner.changed.notify()

    def _add_positions(self, order: Sequence[int]) -> None:
        self._course.extend(order)
        self.owner.positions += len(order)
        self.owner.planner.now.extend(self, [self._shards[index].name for index in order])

    # Leases

    async def lease(self, number: int, position: int, *, partial: bool) -> Lease:
        """Return the shard at a position of the plan, leased. Raises all that fetching it may raise."""
        ref = self.ref(position)
        if number in self._asked or number in self._leases:
            raise ProtocolError(f"request {number} asked for a lease already")
        if len(self._asked) + len(self._leases) >= _MOST_LEASES:
            raise ProtocolError(f"a reader may have {_MOST_LEASES} leases at a time")
        lease = Lease(number, position, Wait(self.job.key, partial=partial, holder=self, url=ref.url))
        self._asked[number] = lease
        try:
            found = await self.owner.leasing.acquire(ref, Class.PLANNED, lease.wait)
        finally:
            self._clock.stop(lease.wait)
            self._asked.pop(number, None)
        self._grant(lease, found)
        return lease

    def _grant(self, lease: Lease, found: Published | Arriving) -> None:
        if isinstance(found, Arriving):
            lease.arriving = found
        else:
            lease.shard, lease.held = found.shard, True
        self.owner.count(hit=isinstance(found, Published) and found.hit)
        self._leases[lease.number] = lease
        self._moved_s = time.monotonic()
        if lease.needed:
            self._take(lease)
        elif lease.shard is not None:
            lease.held = False
            self.owner.holds.drop(lease.shard)

    def need(self, number: int) -> None:
        """Take a shard into the reader's hands, or, where it is still to come, note that there is nothing to read.

        A request that failed meanwhile is needed no more.
        """
        lease = self._asked.get(number) or self._leases.get(number)
        if lease is None or lease.needed:
            return
        lease.needed = True
        if number in self._leases:
            self._take(lease)
        else:
            self._stand_still(lease.wait, self.transfer(lease.position))
            self.owner.planner.now.waits(self, lease.position, self._clock.stalled_s)
            self.owner.changed.notify()

    def _take(self, lease: Lease) -> None:
        if lease.shard is not None and not lease.held:
            shard = self.owner.holds.try_take(lease.shard.key)  # it may have gone and come again since
            lease.held, lease.shard = shard is not None, shard or lease.shard
        if lease.held or lease.shard is None:
            self.owner.planner.now.reads(self, lease.position, self._clock.stalled_s)
        else:  # its room went to somebody who had nothing to read: it will ask again
            self.owner.planner.now.waits(self, lease.position, self._clock.stalled_s)
        self.owner.changed.notify()

    def _stand_still(self, wait: Wait, transfer: Transfer | None) -> None:
        self._clock.start(wait)
        if transfer is not None:
            self.owner.transfers.hurry(transfer)

    async def more(self, number: int, beyond_bytes: int) -> Lease:
        """Return the lease of an arriving shard when more of it is ready than that, or it is whole.

        Raises what its transfer failed with; the lease is over then.
        """
        lease = self._lease(number)
        if lease.arriving is None or lease.position == _OF_A_FORMER_PLAN:
            raise ProtocolError(f"lease {number} is not of a shard that is arriving")
        transfer, url = self.transfer(lease.position), lease.wait.url
        stages = None if transfer is None else transfer.stages
        wait = Wait(self.job.key, stages=stages, holder=self, url=url)
        self._stand_still(wait, transfer)
        try:
            await lease.arriving.beyond(beyond_bytes, wait)
        except ShardcacheError:
            if self._leases.pop(number, None) is not None:
                await self._let_go(lease)
            raise
        finally:
            self._clock.stop(wait)
        lease.look()
        return lease

    async def release(self, number: int, *, read: bool) -> None:
        """Give a lease back, or ask for it no longer; one that is over already is left alone.

        Args:
            read: whether the reader is done with it. It may be without having held it: it found the file in the moment
                before that went to make room.
        """
        asked = self._asked.pop(number, None)
        if asked is not None and asked.task is not None:
            self._clock.stop(asked.wait)
            asked.task.cancel()
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        lease.look()
        if lease.held or (lease.needed and read):
            self.job.shards_done += 1
            self.owner.planner.now.done(self, lease.position, self._clock.stalled_s)
        await self._let_go(lease)

    async def close(self) -> None:
        """End every lease and the plan."""
        self.owner.remove(self)
        while self._leases:
            await self._let_go(self._leases.popitem()[1])
        await self._forget_plan()

    async def _forget_plan(self) -> None:
        """Let go of it bit by bit; and now, for an error's traceback may hold on to a reader that has left."""
        self.owner.positions -= len(self._course)
        del self._course[:]
        while self._shards:
            del self._shards[-_FORGOTTEN_AT_ONCE:]
            await self.owner.turns.wait()

    async def _let_go(self, lease: Lease) -> None:
        self._moved_s = time.monotonic()
        lease.look()
        if lease.held and lease.shard is not None:
            await self.owner.leasing.release(lease.shard)
        elif lease.arriving is not None and lease.shard is None:
            lease.arriving.leave(self.job.key)

    def position(self, number: int) -> int:
        """Return which position of the plan a lease is of."""
        return self._lease(number).position

    def _lease(self, number: int) -> Lease:
        lease = self._leases.get(number)
        if lease is None:
            raise ProtocolError(f"there is no lease {number}")
        return lease

    def ref(self, position: int) -> ShardRef:
        """Return the shard at a position of the plan. Raises ProtocolError where it has none."""
        if not 0 <= position < len(self._course):
            raise ProtocolError(f"the plan has no position {position}")
        return self._shards[self._course[position]].ref

    # What it is at

    def in_hand(self) -> int:
        """Return how many shards it keeps in place."""
        for lease in self._leases.values():
            lease.look()
        return sum(lease.held for lease in self._leases.values())

    def kept_waiting(self) -> Collection[Reader]:
        """Return the workers of its loader that keep their shards until this one has its own.

        The loader waits for this one's batch, and asks the others for few batches more meanwhile: they cannot come to
        the end of a shard with many.
        """
        if self.loader is None:
            return ()
        return [reader for reader in self.job.workers.get(self.loader, ()) if reader._keeps_for(self.loader)]

    def _keeps_for(self, loader: Loader) -> bool:
        held = [lease.shard for lease in self._leases.values() if lease.held and lease.shard is not None]
        least = loader.batch_size * _BATCHES_AHEAD
        return (
            not self._clock.waits
            and time.monotonic() - self._moved_s > _STILL_S
            and all(shard.facts is not None and shard.facts.samples > least for shard in held)
        )

    def transfer(self, position: int) -> Transfer | None:
        """Return the transfer that the shard at a position waits for, if there is one."""
        return self.owner.transfers.get(Names.of(self.ref(position)))

    def charge(self) -> None:
        """Bring its job's account of waiting up to date."""
        self._clock.charge()

    @property
    def waiting_for(self) -> Stage | None:
        """What it waits for now, None while it reads."""
        wait = next(iter(self._clock.waits), None)
        return None if wait is None else wait.stages.present if wait.stages else Stage.ASKING


class Readers:
    """All connected readers."""

    def __init__(
        self,
        planner: Planner,
        leasing: Leasing,
        holds: Holds,
        transfers: Transfers,
        counters: Counters,
        changed: Signal,
        turns: Turns,
        waited: Callable[[Wait, Job], None],
        plan_memory_bytes: int,
    ) -> None:
        self.planner = planner
        self.leasing = leasing
        self.holds = holds
        self.transfers = transfers
        self.changed = changed
        self.turns = turns
        self.waited = waited
        self.shards = PlannedShards()
        self.positions = 0  # of all plans
        self._plan_memory_bytes = plan_memory_bytes
        self._counters = counters
        self._readers: set[Reader] = set()
        self._jobs = Jobs()

    def __iter__(self) -> Iterator[Reader]:
        return iter(self._readers)

    def add(self, job_name: str, uid: int, loader: Loader | None = None) -> Reader:
        """Return a new reader of a user's job."""
        reader = Reader(self._jobs.join(job_name, uid), self, loader)
        self._readers.add(reader)
        if loader is not None:
            reader.job.workers.setdefault(loader, set()).add(reader)
        return reader

    def check_memory(self, shards: int, positions: int, added: int) -> None:
        """Raise CapacityError where a plan of so many shards and positions, some of these added now, is too large."""
        own_bytes = _SHARD_BYTES * shards + _POSITION_BYTES * positions
        all_bytes = _SHARD_BYTES * len(self.shards) + _POSITION_BYTES * (self.positions + added)
        for who, taken_bytes, most_bytes in (
            ("the plan takes", own_bytes, self._plan_memory_bytes // 2),
            ("all plans together take", all_bytes, self._plan_memory_bytes),
        ):
            if taken_bytes > most_bytes:
                raise CapacityError(
                    f"{who} {size(taken_bytes)} of the daemon's memory, {size(most_bytes)} are allowed",
                    remedy="start the daemon with more --plan-memory, or write fewer and larger shards",
                )

    def remove(self, reader: Reader) -> None:
        """Forget a reader and its plan."""
        self._readers.discard(reader)
        reader.job.leave(reader)
        self.planner.now.forget(reader)
        self.changed.notify()

    def count(self, *, hit: bool) -> None:
        """Count a lease."""
        self._counters.hits += hit
        self._counters.misses += not hit

    def jobs(self) -> list[Job]:
        """Return the jobs, oldest first."""
        return list(self._jobs)
