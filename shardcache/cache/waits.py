"""Shards on their way to the cache, and what waits for them: readers for shards, transfers for space, tasks for a turn.

A shard can be read while it is still being downloaded, by readers with nothing else to read (`Arrival`). This is
offered only for origins that check the version on every read: a version checked once, at the end, could be a mixture.
Readers see the contiguous finished parts from the first byte on, and the beginning of the part after them. Each part is
fetched with If-Match, and nothing of it is written before the answer's header proves to be the expected one. Whether
the whole shard is sound is known only at the end, so a reader may learn then that the beginning it read belongs to a
corrupt shard.

Once a shard of any origin has passed every check, readers with nothing else to read get its files
before these are published: a disk that is slow to sync them delays nobody.
"""

import asyncio
import contextlib
import enum
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from shardcache.errors import CorruptShardError, DiskError, ShardcacheError
from shardcache.fetch.reads import Coming
from shardcache.fetch.scheduler import Priority
from shardcache.protocol import ShardRef
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard, Unpublished
from shardcache.store.space import Reservation

T = TypeVar("T")

# A turn ends after this time or number of items. A request passes through the loop about ten times until it is
# answered, and may meet a turn each time.
_TURN_S = 0.001
_MAX_ITEMS = 256
_PIECE = 32  # items between two looks at the clock

RECENT_S = 30.0
"""Length of the time over which a job is judged: many short waits are as bad as a long one."""


class Signal:
    """Broadcast event: `notify` wakes the tasks that are in `wait` at that moment; `count` reveals missed ones."""

    def __init__(self) -> None:
        self.count = 0  # of calls of `notify`
        self._event = asyncio.Event()

    async def wait(self, limit_s: float | None = None) -> None:
        """Wait for the next `notify`, or `limit_s`, if given."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._event.wait()

    def notify(self) -> None:
        """Wake all waiters."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()


class Turns:
    """Turns on the event loop, in the order of request: long computations run one short piece at a time.

    Yielding between pieces is not enough: if 64 readers join at the same moment, each would run a piece before the loop
    gets to anything else.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, items: Sequence[T], act: Callable[[Sequence[T]], object]) -> None:
        """Call `act` with the items, piece by piece. Raises as `act` does."""
        at = 0
        while at < len(items):
            async with self._lock:
                stop, until_s = min(at + _MAX_ITEMS, len(items)), time.perf_counter() + _TURN_S
                while at < stop:
                    act(items[at : at + _PIECE])
                    at += _PIECE
                    if time.perf_counter() > until_s:
                        break
                await asyncio.sleep(0)

    async def wait(self) -> None:
        """Wait for the caller's turn, which lasts until it next awaits."""
        async with self._lock:
            await asyncio.sleep(0)


class Stage(enum.StrEnum):
    """Stage of a transfer, in human-readable words."""

    ASKING = "asking the object store for the shard's version"
    SPACE = "waiting for space in the cache"
    NETWORK = "downloading from the object store"
    DISK = "checking and indexing"


class Stages:
    """History of a transfer's stages, each with its start by the monotonic clock."""

    def __init__(self) -> None:
        self._begun: list[tuple[Stage, float]] = [(Stage.ASKING, time.monotonic())]

    @property
    def present(self) -> Stage:
        """The current stage."""
        return self._begun[-1][0]

    @property
    def present_since_s(self) -> float:
        """Start of the current stage."""
        return self._begun[-1][1]

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        self._begun.append((stage, time.monotonic()))

    def spent_s(self, since_s: float, until_s: float) -> dict[Stage, float]:
        """Return the time spent in each stage during an interval."""
        spent_s: defaultdict[Stage, float] = defaultdict(float)
        for (stage, begun_s), (_, ended_s) in itertools.pairwise([*self._begun, (Stage.DISK, math.inf)]):
            overlap_s = min(until_s, ended_s) - max(since_s, begun_s)
            if overlap_s > 0:
                spent_s[stage] += overlap_s
        return spent_s


class RecentWaits:
    """Time that a reader has waited in the last `RECENT_S` seconds, by second of the monotonic clock."""

    def __init__(self) -> None:
        self._waited_s: dict[int, float] = {}

    def add(self, since_s: float, until_s: float) -> None:
        """Add an interval, which ends now."""
        oldest = int(until_s - RECENT_S)
        for second in [second for second in self._waited_s if second < oldest]:
            del self._waited_s[second]
        for second in range(max(int(since_s), oldest), int(until_s) + 1):
            spent_s = min(until_s, second + 1) - max(since_s, second)
            self._waited_s[second] = self._waited_s.get(second, 0.0) + spent_s

    def total_s(self, now_s: float) -> float:
        """Return the time waited, 0 to `RECENT_S`."""
        start_s = now_s - RECENT_S
        total_s = 0.0
        for second, spent_s in self._waited_s.items():
            share = min(1.0, second + 1 - start_s)  # less than all of the second in which it starts
            total_s += spent_s * max(0.0, share)
        return min(RECENT_S, total_s)


class Class(enum.IntEnum):
    """Priority class of a transfer; the lower class goes first in every queue."""

    WAITING = 0  # a reader has nothing else to read
    PLANNED = 1
    WARM = 2


class PostponedError(Exception):
    """Postponed transfer: no space now for a shard that no reader waits for; its plan will request it again."""


JobKey: TypeAlias = tuple[str, int]
"""A job's name and its user's id."""


class Holder(Hashable, Protocol):
    """A reader, as the owner of a plan and of holds on shards."""

    @property
    def client(self) -> JobKey:
        """The reader's job."""

    def ref(self, position: int) -> ShardRef:
        """Return the shard at a position of the plan."""

    def leased_shards(self) -> int:
        """Return the number of shards held for the reader."""

    def kept_waiting(self) -> "Collection[Holder]":
        """Return the readers that keep their shards until this one gets its own."""


@dataclass(slots=True, eq=False)
class Wait:
    """One caller's wait for a shard, or for more of an arriving one."""

    client: JobKey | None = None  # the reader's job
    since_s: float | None = None  # when the reader began to wait; None while it still has something to read
    partial: bool = False  # whether the caller accepts a shard that is still arriving
    unpublished: bool = False  # whether the caller accepts checked files before their publication
    stages: Stages | None = None  # of the transfer being waited for, once there is one
    holder: Holder | None = None  # the waiting reader; None if the caller is not a reader
    is_file: bool = False  # True if the object's own bytes will do, without samples
    bytes: tuple[int, int] | None = None  # start and end of those that are needed first


class Arrival:
    """A shard that readers can open before it is published: the file that is filled, and its transfer."""

    def __init__(self, partial: Partial, transfer: "Transfer") -> None:
        self.partial = partial
        self.readers: list[JobKey | None] = []  # the job of each reader that has the file open
        self.is_file = False  # True once one of them reads the object's own bytes, whatever they are
        self.files: Unpublished | None = None  # once they have passed every check, unless they are lost again
        self.shard: Shard | None = None  # once it is published
        self.damage: CorruptShardError | None = None  # what readers of `files` have to be warned of
        self.refused: ShardcacheError | None = None  # with `shard`: why it has no samples, and is only a file
        self._transfer = transfer
        self._coming = transfer.coming
        self._failure: ShardcacheError | None = None
        self._parts = 0
        self._ready_bytes = 0
        self._when_left: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"Arrival({self.partial.obj.url!r}, ready_bytes={self.ready_bytes}, readers={len(self.readers)})"

    @property
    def ready_bytes(self) -> int:
        """Number of bytes, from the first on, that may be read."""
        while self._parts in self.partial.done:
            self._parts += 1
        finished_bytes = min(self._parts * self.partial.part_bytes, self.partial.obj.size_bytes)
        # A part that has to be fetched again writes the same bytes to the same place.
        self._ready_bytes = max(self._ready_bytes, finished_bytes + self._coming.written_bytes(self._parts))
        return self._ready_bytes

    def is_worth(self, wait: Wait) -> bool:
        """Return True for a checked shard, or if the bytes needed first can be read before the others."""
        if self._failure is not None:
            return False
        if self._is_checked_for(wait):
            return True
        if not wait.partial or self.partial.codec is not None:
            return False
        if wait.bytes is None:
            return 0 < self.ready_bytes < self.partial.obj.size_bytes
        is_unpublished = self.files is not None or len(self.partial.done) < self.partial.count
        return is_unpublished and self._has(wait.bytes)

    def _is_checked_for(self, wait: Wait) -> bool:
        return wait.unpublished and self.files is not None and self.files.facts.samples is not None

    def _has(self, needed: tuple[int, int]) -> bool:
        part_bytes, stop = self.partial.part_bytes, min(needed[1], self.partial.obj.size_bytes)
        return all(part in self.partial.done for part in range(needed[0] // part_bytes, -(-stop // part_bytes)))

    async def beyond(self, count_bytes: int, wait: Wait) -> None:
        """Wait until more than `count_bytes` are ready, or those that are needed first, or the whole shard.

        Raises the transfer's error.
        """
        self._transfer.waits.add(wait)
        try:
            while not self._serves(wait, count_bytes):
                if self._failure is not None:
                    raise self._failure
                await self._transfer.moved.wait()
        finally:
            self._transfer.waits.discard(wait)

    def _serves(self, wait: Wait, count_bytes: int) -> bool:
        if self.shard is not None or self._is_checked_for(wait):
            return True
        return self.ready_bytes > count_bytes if wait.bytes is None else self._has(wait.bytes)

    def check(self, files: Unpublished) -> None:
        """Announce that the shard has passed every check, and may be read."""
        self.files = files
        self._transfer.moved.notify()

    def publish(self, shard: Shard, refused: ShardcacheError | None) -> None:
        """Announce that the shard is complete. The caller has retained it for each reader."""
        self.shard, self.refused = shard, refused
        self._transfer.moved.notify()

    def fail(self, exn: ShardcacheError) -> None:
        """Announce that the rest will not arrive; the first reason given is the one reported."""
        self._failure = self._failure or exn
        if self.files is not None and isinstance(exn, DiskError):
            # The kernel may forget what it could not write.
            message = f"it could not be written to disk: {exn.message}"
            self.damage = CorruptShardError(message, url=exn.url)
        self.files = None
        self._transfer.moved.notify()

    def leave(self, client: JobKey) -> None:
        """Note that a reader closed the file before it was published."""
        self.readers.remove(client)
        if not self.readers and self._when_left is not None:
            self._when_left()

    def when_left(self, act: Callable[[], None]) -> None:
        """Call `act` once no reader has the file open."""
        if self.readers:
            self._when_left = act
        else:
            act()


@dataclass(slots=True, eq=False)
class Transfer:
    """The fetching of one shard from origin to cache."""

    name: str  # of the shard in plans
    ref: ShardRef
    wanted: Class  # its urgency, not counting waiting readers
    waits: set[Wait] = field(default_factory=set)  # the present waits for the shard
    stages: Stages = field(default_factory=Stages)
    done_bytes: int = 0  # on disk, of `total_bytes`
    coming: Coming = field(default_factory=Coming)  # bytes received that are not on disk yet
    total_bytes: int | None = None  # None until the origin has reported it
    arriving: Arrival | None = None  # early access to the shard, while it can be offered
    moved: Signal = field(default_factory=Signal)  # notified when any of these changes
    outcome: asyncio.Future[Shard] = field(default_factory=asyncio.Future, repr=False)
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def klass(self) -> Class:
        """Present urgency, counting waiting readers."""
        return self.wanted if _longest(self.waits) is None else Class.WAITING

    def begin(self, total_bytes: int) -> None:
        """Begin a download of `total_bytes`, of which nothing has been received yet."""
        self.total_bytes, self.done_bytes, self.coming = total_bytes, 0, Coming(self.moved.notify)

    def set_done(self, done_bytes: int) -> None:
        """Record the download's progress."""
        self.done_bytes = done_bytes
        self.moved.notify()

    @property
    def arrived_bytes(self) -> int:
        """Bytes received so far, on disk or not."""
        return self.done_bytes + self.coming.size_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the transfer's entry in `shardcache status` but its url; its rate is 0 outside the download stage."""
        elapsed_s = time.monotonic() - self.stages.present_since_s
        is_downloading = self.stages.present is Stage.NETWORK and elapsed_s > 0
        return {
            "done_bytes": self.arrived_bytes,
            "total_bytes": self.total_bytes,
            "rate_bytes_per_s": round(self.arrived_bytes / elapsed_s) if is_downloading else 0,
            "class": self.klass.name.lower(),
            "stage": self.stages.present.value,
            "waiters": len(self.waits),
        }


@dataclass(slots=True, eq=False)
class KeyClaim:
    """All transfers that lead to one key. The holder of the lock does the work, with the highest urgency among them."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    transfers: list[Transfer] = field(default_factory=list)
    reservation: Reservation | None = None
    wanted_bytes: int = 0  # further space that it waits for; 0 while it does not wait
    behind: "KeyClaim | None" = None  # the claim whose turn it waits for
    waits_since_s: float = 0.0  # start of the wait, by the monotonic clock
    checked_s: float = -math.inf  # time of the last deadlock check

    @property
    def is_blocked(self) -> bool:
        """True while only space, for this claim or the one ahead of it, lets it continue."""
        return self.wanted_bytes > 0 or (self.behind is not None and self.behind.is_blocked)

    @property
    def reserved_bytes(self) -> int:
        """Size of the reservation."""
        return self.reservation.size_bytes if self.reservation else 0

    @property
    def klass(self) -> Class:
        """The highest urgency."""
        return min(transfer.klass for transfer in self.transfers)

    @property
    def waits(self) -> list[Wait]:
        """All waits for the shard."""
        return [wait for transfer in self.transfers for wait in transfer.waits]

    @property
    def wants_samples(self) -> bool:
        """True if anybody wants the shard's samples."""
        return not all(transfer.ref.is_file for transfer in self.transfers)

    @property
    def wants_file(self) -> bool:
        """True if anybody waits for the object's own bytes, whatever they are, or reads them as they arrive."""
        beginnings = [transfer.arriving for transfer in self.transfers if transfer.arriving]
        return any(wait.is_file for wait in self.waits) or any(beginning.is_file for beginning in beginnings)

    @property
    def needed_first(self) -> Sequence[tuple[int, int]]:
        """Start and end of bytes that readers wait for."""
        return [wait.bytes for wait in self.waits if wait.bytes is not None]

    @property
    def reader_waits(self) -> list[Wait]:
        """The waits of readers that have nothing to read."""
        return [wait for wait in self.waits if wait.since_s is not None]

    def priority(self, next_use_s: Callable[[], float]) -> Priority:
        """Return the priority of the download; `next_use_s` returns when a plan next needs the shard."""
        beginnings = [transfer.arriving for transfer in self.transfers if transfer.arriving]
        readers = [client for beginning in beginnings for client in beginning.readers]
        if (longest := _longest(self.waits)) is not None:
            longest_waits = (_longest(transfer.waits) for transfer in self.transfers)
            alone = bool(readers) or (bool(beginnings) and any(wait and wait.partial for wait in longest_waits))
            return Priority(Class.WAITING, longest.since_s or 0.0, longest.client, alone)
        if readers:  # they will soon have read everything that has arrived
            return Priority(Class.WAITING, time.monotonic(), readers[0], alone=True)
        return Priority(self.klass, next_use_s())

    @contextlib.contextmanager
    def waiting(self, wanted_bytes: int = 0, behind: "KeyClaim | None" = None) -> Iterator[None]:
        """Mark the claim as waiting for space, or for another claim's turn to end."""
        previous = [(transfer, transfer.stages.present) for transfer in self.transfers] if wanted_bytes else []
        self.wanted_bytes, self.behind, self.waits_since_s = wanted_bytes, behind, time.monotonic()
        for transfer, _ in previous:
            transfer.stages.enter(Stage.SPACE)
        try:
            yield
        finally:
            self.wanted_bytes, self.behind = 0, None
            for transfer, stage in previous:
                transfer.stages.enter(stage)


def _longest(waits: Collection[Wait]) -> Wait | None:
    """Return the wait of the reader that has had nothing to read for longest; None if no reader waits."""
    waiting = [wait for wait in waits if wait.since_s is not None]
    return min(waiting, key=lambda wait: wait.since_s or 0.0, default=None)
