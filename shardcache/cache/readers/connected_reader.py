"""One connected reader: its plan, its leases, and its waits.

A plan lists what the reader will read, position by position: whole shards, or ranges of files. A
lease is the reader's right to the shard at one position, from its request to its release. For each
message of the reader's session, `ReaderSession` calls a method of `Reader`.
"""

import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context

from shardcache.cache.fetching.leasing import Published
from shardcache.cache.listings.shard_listing import Listing, name_of
from shardcache.cache.readers.announced_ranges import AnnouncedRanges
from shardcache.cache.readers.held_ranges import HeldRange, HeldRanges
from shardcache.cache.readers.jobs import Job, Loader
from shardcache.cache.readers.lease_table import LeaseTable
from shardcache.cache.readers.leases import OF_A_PREVIOUS_PLAN, Lease, LeaseState, outlasts_batches
from shardcache.cache.readers.plan_memory import PlanMemory
from shardcache.cache.readers.services import ReaderServices
from shardcache.cache.readers.wait_clock import WaitClock
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import JobKey, PriorityClass, Wait
from shardcache.shared.exceptions import CorruptShardError, ProtocolError, ShardcacheError
from shardcache.shared.protocol import ShardRef
from shardcache.shared.wording.redact import excerpt
from shardcache.store.part_file import PartFile, Span
from shardcache.store.shard import Shard

LISTING = "listing the shards"
"""Stage of a reader's wait until its patterns are resolved."""

_IDLE_S = 3.0  # a worker that was granted nothing and released nothing for this long is idle


class Reader:
    """One connected reader: its plan, its leases, and a clock that runs while it waits.

    Args:
        disconnected: called with the reader when it disconnects.
        mates: a view of all workers of the same loader, this reader included.

    Attributes:
        job: the job that the reader's waits and bytes are charged to.
        loader: the loader that the reader is a worker of, if any.
        clock: the reader's present waits.
        context: the context variables of the session, for tasks that work for the reader.
        listing: the shards that the plan names; None without a plan.
        order: for each position of the plan, the number of the shard in `listing`.
        announced: the ranges that the reader has announced.
        unresolved: the patterns of urls that are being resolved for the reader.
    """

    def __init__(
        self,
        job: Job,
        services: ReaderServices,
        plan_memory: PlanMemory,
        disconnected: "Callable[[Reader], None]",
        loader: Loader | None = None,
        mates: "Collection[Reader]" = (),
    ) -> None:
        self.job = job
        self.loader = loader
        self.clock = WaitClock(job)
        self.context = copy_context()
        self.listing: Listing | None = None
        self.order = array("I")
        self.unresolved: Sequence[str] = ()
        self._mates = mates
        self._planner = services.planner
        self._residency = services.residency
        self._counters = services.counters
        self._transfers = services.transfers
        self._leasing = services.leasing
        self._turns = services.turns
        self._changed = services.changed
        self._plan_memory = plan_memory
        self._disconnected = disconnected
        self._leases = LeaseTable()
        self._ranges = HeldRanges(services.residency, services.leasing, services.counters, job.key)
        self.announced = AnnouncedRanges(services, plan_memory, self)
        self._progressed_s = time.monotonic()  # when it was last granted, or released, a shard

    # The plan

    def declare(self, listing: Listing, epoch_reads: int) -> None:
        """Begin a new, empty plan. Raises CapacityError, ProtocolError.

        Args:
            listing: the shards that the plan names.
            epoch_reads: the number of the plan's positions that belong to the present epoch.
        """
        if any(lease.granted is None for lease in self._leases):
            raise ProtocolError("cannot declare a new plan while lease requests are pending")
        for lease in self._leases:
            lease.position = OF_A_PREVIOUS_PLAN
        self.job.shards_planned += epoch_reads
        if listing.is_for_ranges:  # the reader may announce the order of its ranges later
            self._planner.schedule.forget(self)
        else:
            self._planner.schedule.declare(self, job=self.job.key)
        self._ranges.forget_runs()
        self._end_plan()
        self._plan_memory.begin(listing)
        self.listing = listing

    def _end_plan(self) -> None:
        """Drop the plan, if there is one, and the memory counted for it."""
        self.announced.end()
        if self.listing is not None:
            self._plan_memory.end(self.listing, len(self.order))
        self.listing = None
        self.order = array("I")

    async def extend(self, order: Sequence[int]) -> None:
        """Add positions to the plan, by the numbers of their shards. Raises CapacityError."""
        listing = self.listing
        assert listing is not None
        self._plan_memory.check(len(self.order), listing, added=len(order))
        await self._leasing.recall(listing.unversioned(order))
        names = listing.names

        def add(numbers: Sequence[int]) -> None:
            self.order.extend(numbers)
            self._plan_memory.extend(len(numbers))
            if not self._is_of_ranges:
                self._planner.schedule.extend(self, [names[number] for number in numbers])

        await self._turns.take(order, add)  # a long plan is added piece by piece
        self._changed.notify()

    def ref(self, position: int) -> ShardRef:
        """Return the shard at a position of the plan. Raises ProtocolError if there is none."""
        if not 0 <= position < len(self.order):
            raise ProtocolError(f"the plan has no position {position}")
        assert self.listing is not None
        return self.listing.ref(self.order[position])

    def transfer(self, position: int) -> Transfer | None:
        """Return the transfer of the shard at a position of the plan, if there is one."""
        return self._transfers.get(name_of(self.ref(position)))

    # Leases

    async def lease(
        self,
        number: int,
        position: int,
        *,
        partial: bool,
        unpublished: bool = False,
        latest: bool = False,
        span: Span | None = None,
        needed: bool = False,
    ) -> Lease:
        """Lease the shard at a position of the plan. Raises every error that fetching can raise.

        Args:
            number: id of the request, and then of the lease.
            position: the shard's position in the plan.
            partial: True if the reader accepts the shard's beginning while the rest arrives.
            unpublished: True if the reader accepts checked files before they are published.
            latest: True for the origin's present version, whichever version the plan names.
            span: start and end of the bytes that are wanted; counts only in a plan of ranges.
            needed: True if the reader has nothing else to read, which `need` would say later.
        """
        ref = self.ref(position)
        self._leases.check_new(number)
        if not self._is_of_ranges:
            span = None  # other plans lease whole shards
        ahead: Span | None = None
        if span is not None:
            ahead = self._ranges.advance(position, span)
        wait = Wait(
            self.job.key,
            accepts_partial=partial,
            accepts_unpublished=unpublished,
            holder=self,
            bytes=span,
            ahead=ahead,
        )
        lease = Lease(number, position, wait)
        self._leases.add(lease)
        if needed:
            self.need(number)
        acquired: Published | Arrival | PartFile
        try:
            if span is not None:
                acquired = await self._ranges.acquire(number, ref, wait, is_awaited=needed)
            elif latest:
                acquired = await self._leasing.acquire_latest(ref, PriorityClass.PLANNED, wait)
            else:
                acquired = await self._leasing.acquire(ref, PriorityClass.PLANNED, wait)
        finally:
            self._end_wait(wait)
            self._leases.drop(number)
        self._leases.add(lease)  # only a granted lease stays in the table, as the latest
        self._count_hit_or_miss(acquired)
        if isinstance(acquired, Published):
            self._grant(lease, acquired.shard)
        else:
            self._grant(lease, acquired)
        return lease

    def try_lease(self, number: int, position: int, span: Span, *, needed: bool) -> Lease | None:
        """Lease a range without waiting, for a plan of ranges. For the arguments, see `lease`.

        Returns None if the plan is of whole shards, or the range has to be fetched or checked
        first, which `lease` does.
        """
        if not self._is_of_ranges:
            return None
        ref = self.ref(position)
        self._leases.check_new(number)
        acquired = self._ranges.try_acquire(number, ref, span, is_awaited=needed)
        if acquired is None:
            return None
        wait = Wait(self.job.key, holder=self, bytes=span)
        state = LeaseState.AWAITED if needed else LeaseState.REQUESTED
        lease = Lease(number, position, wait, state, task=None)
        self._ranges.advance(position, span)  # its result is unused: nothing is fetched ahead now
        self._leases.add(lease)
        self._grant(lease, acquired)
        return lease

    def _count_hit_or_miss(self, acquired: Published | Arrival | PartFile) -> None:
        if isinstance(acquired, Published) and acquired.is_hit:
            self._counters.hits += 1
            self._counters.hit_bytes += acquired.facts.size_bytes
        else:
            self._counters.misses += 1

    def _grant(self, lease: Lease, acquired: Shard | Arrival | PartFile) -> None:
        """Give a lease its shard or range, which is in use now if the reader waits for it."""
        self._progressed_s = time.monotonic()
        if isinstance(acquired, PartFile):
            assert lease.wait.bytes is not None
            lease.granted = self._ranges.hold(lease.position, acquired, lease.wait.bytes)
        else:
            lease.granted = acquired
        if isinstance(acquired, Arrival):
            lease.files = acquired.files_for(lease.wait)
        if lease.state is LeaseState.AWAITED:
            self._use(lease)
        else:
            lease.state = LeaseState.GRANTED

    @property
    def _is_of_ranges(self) -> bool:
        return self.listing is not None and self.listing.is_for_ranges

    def need(self, number: int) -> None:
        """Record that the reader has reached a lease's shard, and uses the shard or waits for it.

        No-op if there is no such lease, as its request has failed.
        """
        lease = self._leases.get(number)
        if lease is None:
            return
        if lease.state is LeaseState.GRANTED:
            self._use(lease)
        elif lease.state is LeaseState.REQUESTED:
            lease.state = LeaseState.AWAITED
            self._begin_wait(lease.wait, self.transfer(lease.position))
            if lease.wait.bytes is None:
                self._planner.schedule.waits(self, lease.position, self.clock.waited_s)
            else:  # the planner has no plan of ranges
                self._ranges.places.need(number)
            self._changed.notify()

    def _use(self, lease: Lease) -> None:
        """Retain a granted shard, as the reader has reached it."""
        granted = lease.granted
        # 1. The parts of a range are retained already. A published file is retained only for the
        #    reader's first range (see `AheadSpace`). Other ranges stay as they were granted.
        retains_file = lease.wait.bytes is None or self._ranges.places.is_first(lease.number)
        if isinstance(granted, HeldRange) or not retains_file:
            lease.state = LeaseState.GRANTED
            return

        # 2. A published shard may have been evicted, and perhaps re-fetched, since the grant.
        if isinstance(granted, Shard):
            granted = self._residency.retain_cached(granted.key)
        schedule = self._planner.schedule
        if granted is None:
            lease.state = LeaseState.EVICTED
            schedule.waits(self, lease.position, self.clock.waited_s)
        else:
            lease.state = LeaseState.IN_USE
            lease.granted = granted
            self._leases.mark_in_use(lease)
            schedule.reads(self, lease.position, self.clock.waited_s)
        self._changed.notify()

    async def more(self, number: int, beyond_bytes: int) -> Lease:
        """Wait for more of an arriving shard, or for its publication if the reader has all of it.

        Returns the lease. Raises the transfer's error, which ends the lease.

        Args:
            number: id of the lease.
            beyond_bytes: number of bytes that the reader has; this waits until there are more.
        """
        lease = self._leases.granted(number)
        arrival = lease.granted
        if not isinstance(arrival, Arrival) or lease.position == OF_A_PREVIOUS_PLAN:
            raise ProtocolError(f"lease {number} is not on a shard that is still arriving")
        transfer = self.transfer(lease.position)
        wait = Wait(
            self.job.key,
            # A reader that has the unpublished files waits for their publication.
            accepts_unpublished=lease.wait.accepts_unpublished and lease.files is None,
            stages=None if transfer is None else transfer.stages,
            holder=self,
            is_file=self.ref(lease.position).is_file,
        )
        self._begin_wait(wait, transfer)
        try:
            await arrival.wait_beyond(beyond_bytes, wait)
            if arrival.index_error is not None and not wait.is_file:
                raise arrival.index_error
            await self._index(lease, wait)
            lease.files = lease.files or arrival.files_for(wait)
        except ShardcacheError:
            if self._leases.get(number) is lease:  # the lease was not released during the wait
                self._drop(number)
                await self._let_go(lease)
            raise
        finally:
            self._end_wait(wait)
        return lease

    async def _index(self, lease: Lease, wait: Wait) -> None:
        """Have a shard that was published as a plain file indexed, if the reader wants samples."""
        facts = None if lease.shard is None else lease.shard.facts
        if facts is not None and facts.samples is None and not wait.is_file:
            ref = self.ref(lease.position)
            await self._leasing.acquire(ref, PriorityClass.PLANNED, Wait(self.job.key, holder=self))

    async def release(self, number: int, *, read: bool, damage: str = "") -> None:
        """Release a lease, or withdraw its request; no-op if the lease has ended already.

        Args:
            number: id of the lease.
            read: False if the reader could not read the file.
            damage: the fault that the reader found in the shard, which is then checked before it is
                leased again; "" for none.
        """
        lease = self._drop(number)
        if lease is None:
            return
        if lease.range_number is not None:  # before its parts are queued by their next uses
            self.announced.passed(lease.range_number, self.clock.waited_s)
        if isinstance(lease.granted, HeldRange):
            self._ranges.release(lease.granted, read=read)
            return
        if damage and lease.shard is not None:
            lease.shard.suspicion = excerpt(damage)

        if lease.granted is None:  # the request is still pending
            self._end_wait(lease.wait)
            if lease.task is not None:
                lease.task.cancel()
            return

        # A retained shard counts as done even if its file could not be read. A lease that is only
        # granted does not count: the reader has not reached its shard, or reads it by ranges.
        was_reached = lease.state is not LeaseState.GRANTED
        is_done = lease.retained is not None or (read and was_reached)
        if is_done:
            self._count_as_done(lease)
        await self._let_go(lease)

    def _count_as_done(self, lease: Lease) -> None:
        self.job.shards_done += 1
        facts = lease.facts
        if facts is not None:
            self._counters.bills.add_read(facts.url, facts.origin_bytes, self.job.key)
        self._planner.schedule.done(self, lease.position, self.clock.waited_s)

    async def close(self) -> None:
        """Disconnect the reader: end its leases and drop its plan."""
        self._disconnected(self)
        lease = self._leases.latest()
        while lease is not None:
            self._drop(lease.number)
            await self._let_go(lease)
            lease = self._leases.latest()
        # The plan is dropped here, as an error's traceback may keep the reader itself alive.
        self._end_plan()

    async def _let_go(self, lease: Lease) -> None:
        """Release the shard or range of a lease that is no longer in the table."""
        self._progressed_s = time.monotonic()
        self._leases.note_damage(lease)
        if lease.retained is not None:
            await self._leasing.release(lease.retained)
        elif isinstance(lease.granted, Arrival):
            lease.granted.leave(self.job.key)
        elif isinstance(lease.granted, HeldRange):
            self._ranges.let_go(lease.granted)

    def take_damage(self) -> list[CorruptShardError]:
        """Return the damage found in the reader's shards in use since the last call."""
        return self._leases.take_damage()

    def _drop(self, number: int) -> Lease | None:
        """Remove a lease from the table, and return it; None if it has ended already."""
        self._ranges.places.leave(number)
        return self._leases.drop(number)

    def position(self, number: int) -> int:
        """Return the plan position of a lease."""
        return self._leases.granted(number).position

    def wait(self, number: int) -> Wait | None:
        """Return the wait of a lease, pending or granted; None if the lease has ended."""
        lease = self._leases.get(number)
        return None if lease is None else lease.wait

    # Waits

    @contextmanager
    def waiting_for_listing(self, patterns: Sequence[str]) -> Iterator[None]:
        """Count the reader as waiting during the block, in which its patterns are resolved."""
        self.unresolved = patterns
        wait = Wait(self.job.key, holder=self)
        self._begin_wait(wait, None)  # there is no transfer yet
        try:
            yield
        finally:
            self.clock.end(wait)
            self.unresolved = ()

    def _begin_wait(self, wait: Wait, transfer: Transfer | None) -> None:
        self.clock.begin(wait)
        if transfer is not None:
            self._transfers.wait_began(transfer, wait)

    def _end_wait(self, wait: Wait) -> None:
        """End the wait for a lease; no-op unless the wait has begun and not ended."""
        if wait in self.clock:
            self.clock.end(wait)
            assert wait.idle_since_s is not None  # set when the wait began
            waited_s = time.monotonic() - wait.idle_since_s
            measures = self._counters.measures
            measures.wait.observe(waited_s)

    @property
    def waiting_for(self) -> str | None:
        """Stage of the transfer that the reader waits for, or `LISTING`; None while it reads."""
        if not self.clock.runs:
            return None
        if self.unresolved:
            return LISTING
        if self.clock.stages is None:  # there is no transfer yet
            return Stage.ASKING
        return self.clock.stages.present

    # The interface of `Holder`

    @property
    def client(self) -> JobKey:
        """The reader's job."""
        return self.job.key

    def lease_count(self) -> int:
        """Return the number of shards retained for the reader, which are those in use."""
        return len(self.retained())

    def retained(self) -> list[Shard]:
        """Return the shards retained for the reader."""
        return self._leases.retained()

    def kept_waiting(self) -> "Collection[Reader]":
        """Return the loader's other workers that keep their shards until this worker gets its own.

        While the loader waits for this worker's batch, the loader requests only a few more batches
        of the other workers: too few for these workers to finish a shard with many samples.
        """
        if self.loader is None:
            return ()
        batch_size = self.loader.batch_size
        return [mate for mate in self._mates if mate.is_idle_with_many_samples(batch_size)]

    def is_idle_with_many_samples(self, batch_size: int) -> bool:
        """Return whether the reader neither waits nor progresses, and its shards last for long.

        Args:
            batch_size: number of samples in a batch.
        """
        is_idle = not self.clock.runs and time.monotonic() - self._progressed_s > _IDLE_S
        if not is_idle:
            return False
        return all(outlasts_batches(shard, batch_size) for shard in self.retained())
