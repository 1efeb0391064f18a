"""The reading processes that are connected: their plans, their leases, and how long they have waited."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from shardcache.cache.arriving import Arriving
from shardcache.cache.holds import Holds
from shardcache.cache.jobs import Job, Jobs, StallClock
from shardcache.cache.leasing import Leasing, Published
from shardcache.cache.names import Names
from shardcache.cache.planner import Planner
from shardcache.cache.signal import Signal
from shardcache.cache.transfers import Class, Transfer, Transfers
from shardcache.cache.waiting import Stage, Wait
from shardcache.errors import ProtocolError, ShardcacheError
from shardcache.metrics import Counters
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard

_OF_A_FORMER_PLAN = -1


@dataclass(slots=True, eq=False)
class Lease:
    """A shard that a reader may read.

    The one in its hands is held and stays in place. One ahead of that is only an answer given early: the plan keeps
    it, unless somebody who has nothing to read needs the room; the reader then finds no file and asks again.

    Attributes:
        position: in the reader's plan.
        shard: None while it is still arriving.
        arriving: where it was given out before it was whole.
        held: whether it is in the reader's hands, whole.
        stalled_before_s: what the reader's stall clock showed when it took the shard into its hands.
    """

    id: int
    position: int
    shard: Shard | None = None
    arriving: Arriving | None = None
    held: bool = False
    stalled_before_s: float = 0.0

    def look(self) -> None:
        """Notice that what was arriving is whole now, and held for this reader."""
        if self.shard is None and self.arriving is not None and self.arriving.shard is not None:
            self.shard, self.held = self.arriving.shard, True


@dataclass(slots=True, eq=False)
class Reader:
    """One connected reading process."""

    job: Job
    owner: Readers
    refs: dict[str, ShardRef] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)  # the plan's table of shards
    _course: list[str] = field(default_factory=list)
    _asked: dict[int, Wait] = field(default_factory=dict)  # leases that are waited for, by position
    _leases: dict[int, Lease] = field(default_factory=dict)
    _hand: Lease | None = None
    _stalled: Wait | None = None
    _clock: StallClock = field(init=False)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._clock = StallClock(self.job)

    # The plan

    @property
    def shard_count(self) -> int:
        """Number of shards that the plan's indices may name."""
        return len(self._names)

    def declare(self, reads: int) -> None:
        """Begin a plan, with no shards yet; `reads` of all its positions belong to the present epoch."""
        if self._asked:
            raise ProtocolError("a new plan has to wait for the leases that were asked for")
        self.refs, self._names, self._course = {}, [], []
        for lease in self._leases.values():
            lease.position = _OF_A_FORMER_PLAN
        self.job.shards_planned += reads
        self.owner.planner.now.declare(self)

    async def extend(self, shards: Sequence[ShardRef], order: Iterable[int]) -> None:
        """Add to the plan: more shards, and positions that index into all of them."""
        await self.owner.leasing.recall(shards)
        for ref in shards:
            name = Names.of(ref)
            self._names.append(name)
            self.refs[name] = ref
        names = [self._names[index] for index in order]
        self._course += names
        self.owner.planner.now.extend(self, names)
        self.owner.changed.notify()

    # Leases

    async def lease(self, position: int, *, partial: bool) -> Lease:
        """Return the shard at a position of the plan, leased. Raises all that fetching it may raise."""
        ref, wait = self._ref(position), Wait(self.job.key, partial=partial)
        if position in self._asked:
            raise ProtocolError(f"position {position} is asked for already")
        self._asked[position] = wait
        self._settle()
        try:
            lease = self._granted(position, await self.owner.leasing.acquire(ref, Class.PLANNED, wait))
        finally:
            del self._asked[position]
            self._settle()
        if lease is not self._hand:
            self._put_down(lease)
        return lease

    def _granted(self, position: int, found: Published | Arriving) -> Lease:
        lease = Lease(next(self.owner.ids), position)
        if isinstance(found, Arriving):
            lease.arriving = found
        else:
            lease.shard, lease.held = found.shard, True
        self.owner.count(hit=isinstance(found, Published) and found.hit)
        self._leases[lease.id] = lease
        return lease

    async def more(self, lease_id: int, beyond_bytes: int) -> Lease:
        """Return the lease of an arriving shard when more of it is ready than that, or it is whole.

        Raises what its transfer failed with; the lease is over then.
        """
        lease = self._lease(lease_id)
        if lease.arriving is None or lease.position == _OF_A_FORMER_PLAN:
            raise ProtocolError(f"lease {lease_id} is not of a shard that is arriving")
        transfer = self.transfer(lease.position)
        wait = Wait(self.job.key, stages=None if transfer is None else transfer.stages)
        self._clock.start(wait)
        if transfer is not None:
            self.owner.transfers.hurry(transfer)
        try:
            await lease.arriving.beyond(beyond_bytes, wait)
        except ShardcacheError:
            await self._end(lease)
            raise
        finally:
            self._clock.stop()
            self._settle()
        lease.look()
        return lease

    async def release(self, lease_id: int) -> None:
        """Give a lease back."""
        lease = self._lease(lease_id)
        lease.look()
        if lease.held:  # else the reader found no file there
            self.job.shards_done += 1
            waited_s = self._clock.stalled_s - lease.stalled_before_s
            self.owner.planner.now.done(self, lease.position, waited_s)
        del self._leases[lease.id]
        if lease is self._hand:
            self._hand = None
        self._settle()
        await self._let_go(lease)

    async def close(self) -> None:
        """End every lease and the plan."""
        self._clock.stop()
        self._closed = True
        self.owner.remove(self)
        while self._leases:
            await self._end(next(iter(self._leases.values())))

    async def _end(self, lease: Lease) -> None:
        self._leases.pop(lease.id, None)
        if lease is self._hand:
            self._hand = None
        await self._let_go(lease)

    async def _let_go(self, lease: Lease) -> None:
        lease.look()
        if lease.held and lease.shard is not None:
            await self.owner.leasing.release(lease.shard)
        elif lease.arriving is not None and lease.shard is None:
            lease.arriving.leave(self.job.key)

    def position(self, lease_id: int) -> int:
        """Return which position of the plan a lease is of."""
        return self._lease(lease_id).position

    def _lease(self, lease_id: int) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise ProtocolError(f"there is no lease {lease_id}")
        return lease

    def _ref(self, position: int) -> ShardRef:
        if not 0 <= position < len(self._course):
            raise ProtocolError(f"the plan has no position {position}")
        return self.refs[self._course[position]]

    # What it is at

    def _settle(self) -> None:
        """After any change: put the next granted shard into the reader's hands, or note that it waits."""
        if self._closed:
            return
        first = min(self._leases.values(), key=attrgetter("position"), default=None)
        if first is not None and first is not self._hand:
            if self._hand is not None:
                self._put_down(self._hand)
            self._hand = first
            self._pick_up(first)
        position = min(self._asked, default=None)
        if position is not None and self._hand is not None and self._hand.position <= position:
            position = None  # it reads; what it asks for comes after that, unless an earlier one is asked for again
        stalled = None if position is None else self._asked[position]
        if stalled is self._stalled:
            return
        self._clock.stop()
        self._stalled = stalled
        if stalled is not None and position is not None:
            self._clock.start(stalled)
            self.owner.planner.now.waits(self, position)
            if (transfer := self.transfer(position)) is not None:
                self.owner.transfers.hurry(transfer)
            self.owner.changed.notify()

    def _put_down(self, lease: Lease) -> None:
        lease.look()
        if lease.held and lease.shard is not None:
            lease.held = False
            self.owner.holds.drop(lease.shard)

    def _pick_up(self, lease: Lease) -> None:
        lease.look()
        if lease.shard is not None and not lease.held:
            shard = self.owner.holds.try_take(lease.shard.key)  # it may have gone and come again since
            lease.held, lease.shard = shard is not None, shard or lease.shard
        lease.stalled_before_s = self._clock.stalled_s
        if lease.held or lease.shard is None:
            self.owner.planner.now.reads(self, lease.position)
        else:  # its room went to somebody who had nothing to read: it will ask again
            self.owner.planner.now.waits(self, lease.position)
        self.owner.changed.notify()

    def transfer(self, position: int) -> Transfer | None:
        """Return the transfer that the shard at a position waits for, if there is one."""
        return self.owner.transfers.get(Names.of(self._ref(position)))

    def charge(self) -> None:
        """Bring its job's account of waiting up to date."""
        self._clock.charge()

    @property
    def waiting_for(self) -> Stage | None:
        """What it waits for now, None while it reads."""
        wait = self._clock.wait
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
    ) -> None:
        self.planner = planner
        self.leasing = leasing
        self.holds = holds
        self.transfers = transfers
        self.changed = changed
        self.ids = itertools.count(1)
        self._counters = counters
        self._readers: set[Reader] = set()
        self._jobs = Jobs()

    def __iter__(self) -> Iterator[Reader]:
        return iter(self._readers)

    def add(self, job_name: str, uid: int) -> Reader:
        """Return a new reader of a user's job."""
        reader = Reader(self._jobs.join(job_name, uid), self)
        self._readers.add(reader)
        return reader

    def remove(self, reader: Reader) -> None:
        """Forget a reader and its plan."""
        self._readers.discard(reader)
        reader.job.sessions -= 1
        self.planner.now.forget(reader)
        self.changed.notify()

    def count(self, *, hit: bool) -> None:
        """Count a lease."""
        self._counters.hits += hit
        self._counters.misses += not hit

    def ref(self, name: str) -> ShardRef:
        """Return a shard that some reader's plan names."""
        return next(reader.refs[name] for reader in self._readers if name in reader.refs)

    def jobs(self) -> list[Job]:
        """Return the jobs, oldest first."""
        return list(self._jobs)
