"""Claims: the transfers that lead to one cache key, of which one works at a time.

A transfer fetches an object of an origin, which becomes a shard of the cache. A key stands for one
version of the object. Several transfers can lead to it, as plans may name the shard by its version
or by its url alone. `Residency.claiming` makes the claim of a key, and removes the claim with the
key's last transfer. `Fetcher` works under the claim's lock. `check_progress` of `deadlock` examines
what the claims wait for, and the scheduler of connections asks a claim how urgent it is.

A wait (`Wait`) belongs to one caller. The wait is for the whole object, or for a range of the
object's bytes. An object is divisible if its ranges can be fetched by themselves. An `Arrival` is
early access to a shard, for readers that read it while it is downloaded.

Only one claim at a time inflates its shard, such as by decompressing it, since two growing shards
could wait for each other's space. Other claims wait behind that one.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PostponedError, PriorityClass, Wait, longest_wait
from shardcache.fetch.limits.slot_claims import Priority
from shardcache.shared.exceptions import ShardcacheError
from shardcache.store.part_file import PartFile
from shardcache.store.space import Reservation


@dataclass(slots=True, eq=False)
class KeyClaim:
    """All transfers that lead to one key.

    The transfer that holds the lock does the work for all of them, with the urgency of the most
    urgent one.

    Attributes:
        lock: held by the transfer that works.
        transfers: the transfers, in the order in which they joined.
        moved: notified when anything changes for one of the transfers, which all share this signal.
            A part that arrives may wake only those who wait for it.
        part_file: the file with the parts of the object, once some are fetched.
        reservation: the space for the object, while a transfer works.
        arriving_bytes: the part of the reservation for parts that are being fetched by themselves.
            Each of them can be evicted once it has arrived, and its readers have it.
        has_range_readers: True if ranges of the object were read before the whole was fetched.
        wanted_bytes: space that the claim waits for, in addition to its reservation; 0 while it
            waits for none.
        serves_ranges: True while the claim waits for space for the whole object, and readers get
            ranges of it in the meantime.
        claim_ahead: the claim that inflates its shard while this one waits behind it; None if this
            one does not wait for another claim.
        waits_since_s: start of the wait for space or for another claim, by the monotonic clock.
        checked_s: time of the last check for a deadlock, by the monotonic clock.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    transfers: list[Transfer] = field(default_factory=list)
    moved: Signal = field(default_factory=Signal)
    part_file: PartFile | None = None
    reservation: Reservation | None = None
    arriving_bytes: int = 0
    has_range_readers: bool = False
    wanted_bytes: int = 0
    serves_ranges: bool = False
    claim_ahead: "KeyClaim | None" = None
    waits_since_s: float = 0.0
    checked_s: float = -math.inf

    def join(self, transfer: Transfer) -> None:
        """Add a transfer, which shares the claim's signal, parts and wait for space from now on."""
        self.transfers.append(transfer)
        transfer.join(self.moved, self.part_file)
        if self.wanted_bytes:
            transfer.stages.enter(Stage.SPACE)
        self.moved.notify()

    def offer_parts(self, file: PartFile) -> None:
        """Offer the parts in a file to all readers that wait for ranges of the object."""
        if all(transfer.part_file is file for transfer in self.transfers):
            return
        self.part_file = file
        for transfer in self.transfers:
            transfer.part_file = file
        self.moved.notify()

    def give_up_whole(self, exn: ShardcacheError | PostponedError) -> None:
        """Have each transfer give up the whole object, while waits for ranges of it go on.

        Args:
            exn: the reason. If it is an error, the waits for the whole object end with it.
        """
        for transfer in self.transfers:
            transfer.give_up_whole(exn)
        self.moved.notify()

    @property
    def url(self) -> str:
        """Url of the first transfer, for errors."""
        return self.transfers[0].ref.url

    @property
    def reserved_bytes(self) -> int:
        """Size of the reservation."""
        return self.reservation.size_bytes if self.reservation else 0

    @property
    def waits(self) -> list[Wait]:
        """All waits for the shard."""
        return [wait for transfer in self.transfers for wait in transfer.waits]

    @property
    def _is_divisible(self) -> bool:
        """True if ranges of the object can be fetched by themselves, as far as is known."""
        return all(transfer.is_divisible for transfer in self.transfers)

    @property
    def range_waits(self) -> list[Wait]:
        """The waits for ranges of the object, if these can be fetched by themselves."""
        if not self._is_divisible:
            return []
        return [wait for wait in self.waits if wait.bytes is not None]

    @property
    def whole_waits(self) -> list[Wait]:
        """The waits for the whole object; all waits if ranges cannot be fetched by themselves."""
        if not self._is_divisible:
            return self.waits
        return [wait for wait in self.waits if wait.bytes is None]

    @property
    def wants_samples(self) -> bool:
        """True if anybody wants the shard's samples."""
        return not all(transfer.ref.is_file for transfer in self.transfers)

    @property
    def wants_whole(self) -> bool:
        """True if anybody wants the whole object, and not only ranges of it."""
        return any(transfer.is_whole for transfer in self.transfers)

    @property
    def wants_file(self) -> bool:
        """True if anybody waits for the object's own bytes, or reads them as they arrive."""
        if self.has_range_readers:
            return True  # they read the object's own bytes
        if any(wait.is_file for wait in self.waits):
            return True
        return any(arrival.is_file for arrival in self._arrivals)

    @property
    def _arrivals(self) -> list[Arrival]:
        """The arrivals that transfers offer at present."""
        return [transfer.arriving for transfer in self.transfers if transfer.arriving is not None]

    @property
    def needed_first(self) -> Sequence[tuple[int, int]]:
        """The ranges that readers wait for, which are downloaded first: start and end of each."""
        return [wait.bytes for wait in self.waits if wait.bytes is not None]

    def priority(self, next_use_s: Callable[[], float]) -> Priority:
        """Return the priority of the download.

        Args:
            next_use_s: returns when a plan next needs the shard, by the monotonic clock.
        """
        readers = [client for arrival in self._arrivals for client in arrival.readers]
        longest = longest_wait(self.waits)  # of readers that have nothing else to read

        # 1. If readers have nothing else to read, the longest wait counts. `streamed` is True if a
        #    reader reads the shard as the shard arrives: the parts should then arrive in order.
        if longest is not None:
            assert longest.idle_since_s is not None
            return Priority(
                PriorityClass.WAITING,
                deadline_s=longest.idle_since_s,
                client=longest.client,
                streamed=bool(readers) or self._is_awaited_in_part(),
            )

        # 2. If readers read the beginning, they will soon have read everything that has arrived,
        #    and will wait then. Their wait counts as beginning now, so they come after the readers
        #    that wait already.
        if readers:
            return Priority(
                PriorityClass.WAITING,
                deadline_s=time.monotonic(),
                client=readers[0],
                streamed=True,
            )

        # 3. If nobody waits, the time at which a plan needs the shard counts.
        #    The lowest class is the most urgent.
        most_urgent = min(transfer.requested_class for transfer in self.transfers)
        return Priority(most_urgent, deadline_s=next_use_s())

    def _is_awaited_in_part(self) -> bool:
        """Return whether early access is offered, and a transfer's longest wait accepts it."""
        if not self._arrivals:
            return False
        longest_waits = [longest_wait(transfer.waits) for transfer in self.transfers]
        return any(wait is not None and wait.accepts_partial for wait in longest_waits)

    @contextlib.contextmanager
    def waiting_for_space(
        self,
        wanted_bytes: int,
        *,
        serves_ranges: bool = False,
    ) -> Iterator[None]:
        """Mark the claim as waiting for space during the block.

        The claim's transfers show the wait for space as their stage. After the block, the claim and
        its transfers are marked as before.

        Args:
            wanted_bytes: the space, in addition to the claim's reservation.
            serves_ranges: True if only the whole object waits, while ranges of it are served.
        """
        # The wait for a range can be within the wait for the whole object, which then goes on.
        before = (self.wanted_bytes, self.serves_ranges, self.waits_since_s)
        stages = {transfer: transfer.stages.present for transfer in self.transfers}
        self.wanted_bytes = wanted_bytes
        self.serves_ranges = serves_ranges
        self.waits_since_s = time.monotonic()
        for transfer in stages:
            transfer.stages.enter(Stage.SPACE)
        try:
            yield
        finally:
            self.wanted_bytes, self.serves_ranges, self.waits_since_s = before
            # A transfer that joined the claim during the block was asking for the object's version
            # before that.
            for transfer in self.transfers:
                transfer.stages.enter(stages.get(transfer, Stage.ASKING))

    @contextlib.contextmanager
    def waiting_behind(self, other: "KeyClaim") -> Iterator[None]:
        """Mark the claim as waiting, during the block, until another has inflated its shard."""
        self.claim_ahead = other
        self.waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self.claim_ahead = None
