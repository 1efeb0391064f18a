"""The reading processes that are connected: their plans, their leases, and how long they have waited."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.leasing import Leasing
from shardcache.cache.names import Names
from shardcache.cache.signal import Signal
from shardcache.cache.transfers import Class, Transfer, Transfers
from shardcache.errors import ProtocolError
from shardcache.metrics import Counters
from shardcache.plan.timeline import Timeline
from shardcache.protocol import ShardRef
from shardcache.store.shard import Facts, Shard

# Jobs without a connection are shown until so many newer ones have come: epochs end and begin.
_PAST_JOBS = 32


@dataclass(slots=True)
class Job:
    """What is told of all readers of one job of one user.

    Attributes:
        shards_planned: shards of the epochs that its readers have begun.
        shards_done: shards read and given back.
        stall_s: seconds in which a reader had nothing to read, all readers together.
    """

    name: str
    uid: int
    sessions: int = 0
    shards_planned: int = 0
    shards_done: int = 0
    stall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return what `shardcache status` shows of it."""
        return {
            "name": self.name,
            "uid": self.uid,
            "sessions": self.sessions,
            "shards_planned": self.shards_planned,
            "shards_done": self.shards_done,
            "stall_s": round(self.stall_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Lease:
    """A shard that stays in place for a reader until it is released."""

    id: int
    shard: Shard
    facts: Facts


@dataclass(slots=True)
class _StallClock:
    """Runs while a reader waits for a shard and holds none that it could read meanwhile."""

    job: Job
    since_s: float | None = None

    def set(self, stalled: bool) -> None:
        now_s = time.monotonic()
        if self.since_s is not None:
            self.job.stall_s += now_s - self.since_s
        self.since_s = now_s if stalled else None


@dataclass(slots=True, eq=False)
class Reader:
    """One connected reading process."""

    job: Job
    owner: Readers
    refs: dict[str, ShardRef] = field(default_factory=dict)
    _course: list[str] = field(default_factory=list)
    _leases: dict[int, Lease] = field(default_factory=dict)
    _waiting: dict[int, str] = field(default_factory=dict)
    _clock: _StallClock = field(init=False)

    def __post_init__(self) -> None:
        self._clock = _StallClock(self.job)

    async def declare(self, shards: Sequence[ShardRef], order: Sequence[int], following: Sequence[int]) -> None:
        """Set what this reader will read: indices into `shards`, of this epoch and of the next."""
        await self.owner.leasing.recall(shards)
        names = [Names.of(ref) for ref in shards]
        self.refs = dict(zip(names, shards, strict=True))
        self._course = [names[index] for index in itertools.chain(order, following)]
        self.job.shards_planned += len(order)
        self.owner.timeline.declare(self, self._course)
        self.owner.changed.notify()

    async def lease(self, position: int) -> Lease:
        """Return the shard at a position of the plan, leased. Raises all that fetching it may raise."""
        ref = self._ref(position)
        self.owner.timeline.advance(self, position)
        self.owner.changed.notify()
        request = next(self.owner.ids)
        self._waiting[request] = Names.of(ref)
        self._look_for_stall()
        try:
            shard, facts, hit = await self.owner.leasing.acquire(ref, Class.NEXT if self._leases else Class.WAITING)
        finally:
            del self._waiting[request]
            self._look_for_stall()
        self.owner.counters.hits += hit
        self.owner.counters.misses += not hit
        lease = Lease(next(self.owner.ids), shard, facts)
        self._leases[lease.id] = lease
        self._look_for_stall()
        return lease

    async def release(self, lease_id: int) -> None:
        """Give a lease back."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            raise ProtocolError(f"there is no lease {lease_id}")
        self.job.shards_done += 1
        self._look_for_stall()
        await self.owner.leasing.release(lease.shard)

    def transfer(self, position: int) -> Transfer | None:
        """Return the transfer that the shard at a position waits for, if there is one."""
        return self.owner.transfers.get(Names.of(self._ref(position)))

    async def close(self) -> None:
        """End every lease and the plan."""
        self._clock.set(stalled=False)
        self.owner.remove(self)
        while self._leases:
            _, lease = self._leases.popitem()
            await self.owner.leasing.release(lease.shard)

    def _ref(self, position: int) -> ShardRef:
        if not 0 <= position < len(self._course):
            raise ProtocolError(f"the plan has no position {position}")
        return self.refs[self._course[position]]

    def _look_for_stall(self) -> None:
        """Run the clock, and hurry what is waited for, while there is nothing to read."""
        stalled = bool(self._waiting) and not self._leases
        self._clock.set(stalled)
        for transfer in map(self.owner.transfers.get, self._waiting.values() if stalled else ()):
            if transfer is not None:
                transfer.klass = Class.WAITING


class Readers:
    """All connected readers, and the jobs that they belong to."""

    def __init__(
        self,
        timeline: Timeline,
        leasing: Leasing,
        transfers: Transfers,
        counters: Counters,
        changed: Signal,
    ) -> None:
        self.counters = counters
        self.timeline = timeline
        self.leasing = leasing
        self.transfers = transfers
        self.changed = changed
        self.ids = itertools.count(1)
        self._readers: set[Reader] = set()
        self._jobs: dict[tuple[str, int], Job] = {}

    def add(self, job_name: str, uid: int) -> Reader:
        """Return a new reader of a user's job."""
        key = (job_name, uid)
        job = self._jobs.pop(key, None) or Job(job_name, uid)
        self._jobs[key] = job  # at the end: the youngest
        job.sessions += 1
        self._drop_past()
        reader = Reader(job, self)
        self._readers.add(reader)
        return reader

    def remove(self, reader: Reader) -> None:
        """Forget a reader and its plan."""
        self._readers.discard(reader)
        reader.job.sessions -= 1
        self.timeline.forget(reader)
        self.changed.notify()

    def ref(self, name: str) -> ShardRef:
        """Return a shard that some reader's plan names."""
        return next(reader.refs[name] for reader in self._readers if name in reader.refs)

    def jobs(self) -> list[Job]:
        """Return the jobs, oldest first."""
        return list(self._jobs.values())

    def _drop_past(self) -> None:
        past = [key for key, job in self._jobs.items() if not job.sessions]
        for key in past[: max(0, len(past) - _PAST_JOBS)]:
            del self._jobs[key]
