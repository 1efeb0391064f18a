"""Connected readers and their jobs: plans, leases and waits."""

import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.leases import Lease, LeaseState
from shardcache.cache.planner import Listing, name_of
from shardcache.cache.transfers import Leasing, Published
from shardcache.cache.waits import Arrival, Class, JobKey, RecentWaits, Stage, Transfer, Turns, Wait
from shardcache.errors import CapacityError, CorruptShardError, ProtocolError, ShardcacheError
from shardcache.protocol import MAX_JOB_CHARS, ShardRef
from shardcache.redact import excerpt
from shardcache.store.shard import Shard
from shardcache.units import size, user_name

LISTING = "listing the shards"
"""What a reader waits for until its patterns are resolved."""

_OF_A_PREVIOUS_PLAN = -1
_POSITION_BYTES = 64  # memory taken by a position of a plan
_MAX_LEASES = 4096  # more than any reader needs: each is an open file

# More batches than a loader requests from one worker before it needs another's (`prefetch_factor` defaults to 2).
_BATCHES_AHEAD = 4
_STILL_S = 3.0  # a worker that has neither taken nor released a shard for this long counts as idle

# Number of disconnected jobs still shown: readers disconnect between epochs.
_PAST_JOBS = 32

_CAUSES = {Stage.ASKING: "network_s", Stage.NETWORK: "network_s", Stage.SPACE: "space_s", Stage.DISK: "disk_s"}


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader, which takes batches of `batch_size` samples from its workers in turn."""

    name: str  # unique among the loaders of its rank's process
    rank: int
    batch_size: int


@dataclass(slots=True, eq=False)
class Job:
    """All readers of one job of one user."""

    name: str
    uid: int
    sessions: int = 0  # connected readers
    shards_planned: int = 0  # in the epochs that its readers have begun
    shards_done: int = 0  # read and released
    samples_unmatched: int = 0  # read without one of the same key in the shards that they are joined with
    waited_s: float = 0.0  # with nothing to read, summed over all readers
    waited_by_cause_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_CAUSES.values(), 0.0))

    @property
    def key(self) -> JobKey:
        """Unique key of the job."""
        return self.name, self.uid

    def to_json(self) -> dict[str, Any]:
        """Return the job's entry in `shardcache status`."""
        return {
            "name": self.name,
            "uid": self.uid,
            "user": user_name(self.uid),
            "sessions": self.sessions,
            "shards_planned": self.shards_planned,
            "shards_done": self.shards_done,
            "samples_unmatched": self.samples_unmatched,
            "waited_s": round(self.waited_s, 3),
            "waited": {cause: round(spent_s, 3) for cause, spent_s in self.waited_by_cause_s.items()},
        }


class Reader:
    """One connected reader: its plan, its leases, and a stopwatch that runs while it has nothing to read."""

    def __init__(self, job: Job, owner: "Readers", loader: Loader | None = None) -> None:
        self.job = job
        self.loader = loader  # that it is a worker of, if any
        self._owner = owner
        self._residency = owner.leasing.residency
        self._planner = owner.leasing.residency.planner
        self.listing: Listing | None = None  # the shards that the plan names
        self.order = array("I")  # for each position, the number of the shard
        self._leases: dict[int, Lease] = {}
        self._damage: list[CorruptShardError] = []  # found in shards in use, and not taken yet
        self._waits: list[Wait] = []  # longest first; empty while it reads
        self._waited_s = 0.0
        self._charged_until_s = 0.0
        self._moved_s = time.monotonic()  # when it last took or released a shard
        self._recent = RecentWaits()
        self.resolving: Sequence[str] = ()  # the patterns whose shards it waits to be told

    # The plan

    def declare(self, listing: Listing, reads: int) -> None:
        """Begin a new, empty plan; `reads` is the number of its positions in this epoch. Raises CapacityError."""
        if any(lease.granted is None for lease in self._leases.values()):
            raise ProtocolError("cannot declare a new plan while lease requests are pending")
        for lease in self._leases.values():
            lease.position = _OF_A_PREVIOUS_PLAN
        self.job.shards_planned += reads
        self._planner.now.declare(self, job=self.job.key)
        self.order, self.listing = array("I"), None
        self._owner.check_memory(self, listing, 0)
        self.listing = listing

    async def extend(self, order: Sequence[int]) -> None:
        """Extend the plan by positions: numbers of its shards. Raises CapacityError."""
        assert self.listing is not None
        self._owner.check_memory(self, self.listing, len(order))
        versions, names = self.listing.shards.versions, self.listing.names
        await self._owner.leasing.recall(names[number] for number in dict.fromkeys(order) if not versions[number])

        def add(some: Sequence[int]) -> None:
            self.order.extend(some)
            self._planner.now.extend(self, [names[number] for number in some])

        await self._owner.turns.take(order, add)
        self._residency.changed.notify()

    def ref(self, position: int) -> ShardRef:
        """Return the shard at a position of the plan. Raises ProtocolError if there is no such position."""
        if not 0 <= position < len(self.order):
            raise ProtocolError(f"the plan has no position {position}")
        assert self.listing is not None
        return self.listing.ref(self.order[position])

    def transfer(self, position: int) -> Transfer | None:
        """Return the transfer of the shard at a position, if there is one."""
        return self._owner.leasing.transfers.get(name_of(self.ref(position)))

    # Leases

    async def lease(
        self,
        number: int,
        position: int,
        *,
        partial: bool,
        unpublished: bool = False,
        latest: bool = False,
        first: tuple[int, int] | None = None,
    ) -> Lease:
        """Lease the shard at a position of the plan, with `latest` in its present version, whatever the plan says.

        With `partial`, its beginning will do; with `unpublished`, so will its checked files before
        they are published. Raises every error that fetching it can raise.
        """
        ref = self.ref(position)
        if number in self._leases:
            raise ProtocolError(f"request {number} has already asked for a lease")
        if len(self._leases) >= _MAX_LEASES:
            raise ProtocolError(f"a reader may have at most {_MAX_LEASES} leases")
        wait = Wait(
            self.job.key,
            partial=partial,
            unpublished=unpublished,
            holder=self,
            bytes=first,
        )
        lease = self._leases[number] = Lease(number, position, wait)
        try:
            if latest:
                found = await self._owner.leasing.acquire_latest(ref, Class.PLANNED, wait)
            else:
                found = await self._owner.leasing.acquire(ref, Class.PLANNED, wait)
        finally:
            self._end_wait(wait)
            self._leases.pop(number, None)
        self._leases[number] = lease
        self._grant(lease, found)
        return lease

    def _grant(self, lease: Lease, found: Published | Arrival) -> None:
        counters = self._residency.counters
        if isinstance(found, Published) and found.hit:
            counters.hits += 1
            counters.hit_bytes += found.facts.size_bytes
        else:
            counters.misses += 1
        self._moved_s = time.monotonic()
        if isinstance(found, Published):
            lease.granted = found.shard
        else:
            lease.granted = found
            lease.files = found.files if lease.wait.unpublished else None
        if lease.state is LeaseState.AWAITED:
            self._use(lease)
        else:
            lease.state = LeaseState.GRANTED

    def need(self, number: int) -> None:
        """Use a lease's shard from now on, or count the reader as waiting for it; no-op if the request has failed."""
        lease = self._leases.get(number)
        if lease is None:
            return
        if lease.state is LeaseState.GRANTED:
            self._use(lease)
        elif lease.state is LeaseState.REQUESTED:
            lease.state = LeaseState.AWAITED
            self._begin_wait(lease.wait, self.transfer(lease.position))
            self._planner.now.waits(self, lease.position, self._waited_s)
            self._residency.changed.notify()

    def _use(self, lease: Lease) -> None:
        now, found = self._planner.now, lease.granted
        if isinstance(found, Shard):  # it may have been evicted, and perhaps re-fetched, since the grant
            found = self._residency.retain_cached(found.key)
        if found is None:
            lease.state = LeaseState.EVICTED
            now.waits(self, lease.position, self._waited_s)
        else:
            lease.state, lease.granted = LeaseState.IN_USE, found
            now.reads(self, lease.position, self._waited_s)
        self._residency.changed.notify()

    async def more(self, number: int, beyond_bytes: int, first: tuple[int, int] | None = None) -> Lease:
        """Wait for more than `beyond_bytes` of an arriving shard, for its `first` bytes, or all of it.

        If all of it was granted before its publication, wait for that. The transfer's error ends
        the lease.
        """
        lease = self._lease(number)
        arrival = lease.granted
        if not isinstance(arrival, Arrival) or lease.position == _OF_A_PREVIOUS_PLAN:
            raise ProtocolError(f"lease {number} is not on a shard that is still arriving")
        transfer = self.transfer(lease.position)
        wait = Wait(
            self.job.key,
            unpublished=lease.wait.unpublished and lease.files is None,
            stages=None if transfer is None else transfer.stages,
            holder=self,
            is_file=self.ref(lease.position).is_file,
            bytes=first,
        )
        self._begin_wait(wait, transfer)
        try:
            await arrival.beyond(beyond_bytes, wait)
            if arrival.refused is not None and not wait.is_file:
                raise arrival.refused
            if wait.unpublished:
                lease.files = arrival.files
        except ShardcacheError:
            if self._leases.get(number) is lease:  # not released since, nor its number used again
                del self._leases[number]
                await self._let_go(lease)
            raise
        finally:
            self._end_wait(wait)
        return lease

    async def release(self, number: int, *, read: bool, damage: str = "") -> None:
        """Release a lease or its request; no-op if it has ended. `read`: the shard is finished, if evicted or not.

        With `damage`, what the reader found wrong with the shard, it is checked before it is next leased.
        """
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        if damage and lease.shard is not None:
            lease.shard.suspicion = excerpt(damage)
        if lease.granted is None:
            self._end_wait(lease.wait)
            if lease.task is not None:
                lease.task.cancel()
            return
        if lease.retained is not None or (read and lease.state is not LeaseState.GRANTED):
            self.job.shards_done += 1
            if (facts := lease.facts) is not None:
                self._residency.counters.bills.add("read", facts.url, facts.origin_bytes, 1, self.client)
            self._planner.now.done(self, lease.position, self._waited_s)
        await self._let_go(lease)

    async def close(self) -> None:
        """Disconnect the reader: end its leases and drop its plan."""
        self._owner.remove(self)
        while self._leases:
            await self._let_go(self._leases.popitem()[1])
        self.listing = None  # explicitly, as an error's traceback may keep a disconnected reader alive
        del self.order[:]

    async def _let_go(self, lease: Lease) -> None:
        self._moved_s = time.monotonic()
        self._note_damage(lease)
        if lease.retained is not None:
            await self._owner.leasing.release(lease.retained)
        elif isinstance(lease.granted, Arrival):
            lease.granted.leave(self.job.key)

    def take_damage(self) -> list[CorruptShardError]:
        """Return the damage found in shards while the reader had them in use, each once."""
        for lease in self._leases.values():
            self._note_damage(lease)
        found, self._damage = self._damage, []
        return found

    def _note_damage(self, lease: Lease) -> None:
        if not lease.damage_seen and lease.damage is not None:
            lease.damage_seen = True
            self._damage.append(lease.damage)

    def position(self, number: int) -> int:
        """Return the plan position of a lease."""
        return self._lease(number).position

    def _lease(self, number: int) -> Lease:
        lease = self._leases.get(number)
        if lease is None or lease.granted is None:
            raise ProtocolError(f"no lease has number {number}")
        return lease

    # Waits

    @contextmanager
    def waiting_for_listing(self, patterns: Sequence[str]) -> Iterator[None]:
        """Count the reader as waiting while patterns are resolved: it has nothing to read yet."""
        self.resolving = patterns
        wait = Wait(self.job.key, holder=self)
        self._begin_wait(wait, None)
        try:
            yield
        finally:
            self._stop_waiting(wait)
            self.resolving = ()

    def _begin_wait(self, wait: Wait, transfer: Transfer | None) -> None:
        self.charge()
        wait.since_s = self._charged_until_s
        self._waits.append(wait)
        if transfer is not None:
            self._owner.leasing.transfers.hurry(transfer)

    def _end_wait(self, wait: Wait) -> None:
        """End the wait for a lease; no-op if it was never begun."""
        if wait in self._waits:
            self._stop_waiting(wait)
            assert wait.since_s is not None  # set when it began
            self._residency.counters.measures.wait.observe(time.monotonic() - wait.since_s)

    def _stop_waiting(self, wait: Wait) -> None:
        self.charge()
        self._waits.remove(wait)

    def charge(self) -> None:
        """Charge the time waited since the last call to the job, by the stages of the transfer being waited for."""
        since_s, now_s = self._charged_until_s, time.monotonic()
        self._charged_until_s = now_s
        if not self._waits:
            return
        self._recent.add(since_s, now_s)
        self._waited_s += now_s - since_s
        self.job.waited_s += now_s - since_s
        stages, known_s = self._waits[0].stages, 0.0
        for stage, spent_s in stages.spent_s(since_s, now_s).items() if stages else ():
            self.job.waited_by_cause_s[_CAUSES[stage]] += spent_s
            known_s += spent_s
        self.job.waited_by_cause_s[_CAUSES[Stage.ASKING]] += now_s - since_s - known_s

    @property
    def waiting_for(self) -> str | None:
        """Stage of the transfer that the reader waits for, or `LISTING`; None while it reads."""
        if not self._waits:
            return None
        if self.resolving:
            return LISTING
        stages = self._waits[0].stages
        return Stage.ASKING if stages is None else stages.present

    @property
    def waits_since_s(self) -> float | None:
        """Start of the present wait, by the monotonic clock; None while it reads."""
        return self._waits[0].since_s if self._waits else None

    def recently_waited_s(self) -> float:
        """Return the time waited in the last `RECENT_S` seconds, as of the latest `charge`."""
        return self._recent.total_s(self._charged_until_s)

    # As a holder of space

    @property
    def client(self) -> JobKey:
        """The reader's job."""
        return self.job.key

    def leased_shards(self) -> int:
        """Return the number of shards retained for the reader."""
        return len(self.retained())

    def retained(self) -> list[Shard]:
        """Return the shards retained for the reader."""
        return [shard for lease in self._leases.values() if (shard := lease.retained) is not None]

    def kept_waiting(self) -> "Collection[Reader]":
        """Return the workers of the same loader that keep their shards until this one gets its own.

        The loader waits for this worker's batch and asks the others for only a few more batches in the meantime: too
        few for them to finish a shard with many samples.
        """
        if self.loader is None:
            return ()
        workers = self._owner.workers.get((self.job.key, self.loader), ())
        return [reader for reader in workers if reader._keeps_for(self.loader)]

    def _keeps_for(self, loader: Loader) -> bool:
        min_samples = loader.batch_size * _BATCHES_AHEAD
        return (
            not self._waits
            and time.monotonic() - self._moved_s > _STILL_S
            and all(shard.facts and (shard.facts.samples or 0) > min_samples for shard in self.retained())
        )


class Readers:
    """All connected readers, their jobs, and the most recent jobs without readers."""

    def __init__(self, leasing: Leasing, turns: Turns, plan_memory_bytes: int) -> None:
        self.leasing = leasing
        self.turns = turns
        self.workers: dict[tuple[JobKey, Loader], set[Reader]] = {}
        self._plan_memory_bytes = plan_memory_bytes
        self._readers: set[Reader] = set()
        self._jobs: dict[JobKey, Job] = {}  # most recently joined last

    def __iter__(self) -> Iterator[Reader]:
        return iter(list(self._readers))

    def jobs(self) -> list[Job]:
        """Return the jobs, most recently joined last."""
        return list(self._jobs.values())

    def add(self, job_name: str, uid: int, loader: Loader | None = None) -> Reader:
        """Add a reader to a user's job and return it. Raises ProtocolError if the job's name is too long to show."""
        if len(job_name) > MAX_JOB_CHARS:
            raise ProtocolError(f"the job name has {len(job_name)} characters; the limit is {MAX_JOB_CHARS}")
        job = self._jobs.pop((job_name, uid), None) or Job(job_name, uid)
        self._jobs[job.key] = job
        job.sessions += 1
        past = [key for key, other in self._jobs.items() if not other.sessions]
        for key in past[: max(0, len(past) - _PAST_JOBS)]:
            del self._jobs[key]
            self.leasing.residency.counters.bills.amounts.pop(key, None)
        reader = Reader(job, self, loader)
        self._readers.add(reader)
        if loader is not None:
            self.workers.setdefault((job.key, loader), set()).add(reader)
        return reader

    def remove(self, reader: Reader) -> None:
        """Forget a reader and its plan."""
        self._readers.discard(reader)
        reader.job.sessions -= 1
        if reader.loader is not None:
            workers = self.workers[reader.job.key, reader.loader]
            workers.discard(reader)
            if not workers:
                del self.workers[reader.job.key, reader.loader]
        residency = self.leasing.residency
        residency.planner.now.forget(reader)
        residency.changed.notify()

    def check_memory(self, reader: Reader, listing: Listing, added: int) -> None:
        """Raise CapacityError if a reader's plan takes too much memory with `added` positions, alone or with all."""
        own_bytes = _POSITION_BYTES * (len(reader.order) + added) + listing.memory_bytes
        lists = {listing, *(each.listing for each in self._readers if each.listing is not None)}
        all_bytes = _POSITION_BYTES * (sum(len(each.order) for each in self._readers) + added)
        all_bytes += sum(each.memory_bytes for each in lists)
        for what, taken_bytes, max_bytes in (
            ("the plan takes", own_bytes, self._plan_memory_bytes // 2),
            ("all plans together take", all_bytes, self._plan_memory_bytes),
        ):
            if taken_bytes > max_bytes:
                raise CapacityError(
                    f"{what} {size(taken_bytes)} of the daemon's memory; the limit is {size(max_bytes)}",
                    remedy="start the daemon with more --plan-memory, or write fewer and larger shards",
                )
