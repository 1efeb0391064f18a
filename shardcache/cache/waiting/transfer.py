"""A transfer of one shard from origin to cache, as its callers and the status pages see it.

`Transfers` makes and ends transfers, `Fetcher` does their work. A `Wait` is one caller that waits
for the shard, or for a range of its object's bytes. An object is divisible if its ranges can be
fetched by themselves: the origin then checks with each request that the version is the same.

As long as callers request only ranges of a divisible object, a transfer fetches only these. From
the first request for the whole object on, it fetches the whole object.

Several transfers can be of the same object, as plans may name a shard by its version or by its url
alone. They have one claim (`claims`), under which one of them works for all.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.stages import Stage, Stages
from shardcache.cache.waiting.waits import PostponedError, PriorityClass, Wait
from shardcache.fetch.reads import UnfinishedParts
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.protocol import ShardRef
from shardcache.store.part_file import PartFile
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard


@dataclass(slots=True, eq=False)
class Transfer:
    """The fetching of one shard from origin to cache.

    Attributes:
        name: the shard's name in plans.
        ref: the shard.
        requested_class: priority class of the most urgent request. Readers that wait do not count
            here, but in `priority_class`.
        is_whole: False while only ranges of the object are wanted.
        is_divisible: False once the object is known to be available only as a whole.
        give_up_reason: the reason for which the whole object was given up, while ranges of it are
            still fetched; None if it was not.
        waits: the present waits for the shard.
        stages: the present stage, and the time spent in each.
        done_bytes: the number of bytes in finished parts, out of `total_bytes`.
        unfinished: the parts that are being received, and how much of each.
        total_bytes: size of the object; None until the origin has reported it.
        arriving: early access to the shard, while it can be offered.
        part_file: the file with the parts that have arrived, for readers of ranges.
        moved: notified after a change that waiting tasks have to see, such as arrived bytes. All
            transfers of the same object share it. A part that arrives may wake only those who wait
            for it.
        outcome: the shard once the transfer has succeeded, or the error. The result None means that
            only ranges were wanted, and that all of them have been fetched.
        task: the task that does the work; None until it is started.
    """

    name: str
    ref: ShardRef
    requested_class: PriorityClass
    is_whole: bool = True
    is_divisible: bool = True
    give_up_reason: ShardcacheError | PostponedError | None = None
    waits: set[Wait] = field(default_factory=set)
    stages: Stages = field(default_factory=Stages)
    done_bytes: int = 0
    unfinished: UnfinishedParts = field(default_factory=UnfinishedParts)
    total_bytes: int | None = None
    arriving: Arrival | None = None
    part_file: PartFile | None = None
    moved: Signal = field(default_factory=Signal)
    outcome: asyncio.Future[Shard | None] = field(default_factory=asyncio.Future, repr=False)
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def priority_class(self) -> PriorityClass:
        """Present priority class: `WAITING` while a reader with nothing else to read waits.

        Otherwise `requested_class`.
        """
        has_idle_reader = any(wait.idle_since_s is not None for wait in self.waits)
        return PriorityClass.WAITING if has_idle_reader else self.requested_class

    def join(self, moved: Signal, part_file: PartFile | None) -> None:
        """Share the signal and the parts of the claim with its other transfers.

        Args:
            moved: the claim's signal.
            part_file: the claim's file with the parts that have arrived; None if there is none yet.
        """
        previous = self.moved
        self.moved = moved
        self.part_file = part_file
        # Tasks that wait for the previous signal look again, and then wait for the new signal.
        previous.notify()

    def want_whole(self) -> None:
        """Want all of the object from now on."""
        if not self.is_whole:
            self.is_whole = True
            self.give_up_reason = None
            self.moved.notify()

    def give_up_whole(self, exn: ShardcacheError | PostponedError) -> None:
        """Want only ranges of the object from now on. Waits for ranges go on.

        The caller notifies `moved` once this is done for all transfers that share it.

        Args:
            exn: the reason. If it is an error, the waits for the whole object end with this error.
                PostponedError does not end them.
        """
        if not self.is_whole:
            return
        self.is_whole = False
        self.give_up_reason = exn
        if isinstance(exn, ShardcacheError):
            whole_waits = (wait for wait in self.waits if wait.bytes is None)
            for wait in whole_waits:
                wait.error = exn

    def begin(self, total_bytes: int) -> None:
        """Begin a download of `total_bytes`, of which nothing has been received yet."""
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.unfinished = UnfinishedParts(self._bytes_written)

    def _bytes_written(self) -> None:
        """Have readers of an arriving shard look for more; nobody else reads unfinished parts."""
        if self.arriving is not None:
            self.moved.notify()

    def offer(self, partial: Partial) -> Arrival:
        """Offer early access to the shard, while its bytes arrive in `partial`."""
        self.arriving = Arrival(partial, self.waits, self.unfinished, self.moved)
        # Files that are kept by part have their parts evicted one by one. The parts of this file
        # belong to the transfer, which needs all of them for the shard.
        self.part_file = PartFile(partial, is_kept_by_part=False)
        return self.arriving

    def set_done(self, done_bytes: int) -> None:
        """Record the number of bytes in finished parts."""
        self.done_bytes = done_bytes
        self.moved.notify()

    @property
    def arrived_bytes(self) -> int:
        """Number of bytes received so far, in finished and unfinished parts."""
        return self.done_bytes + self.unfinished.received_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the transfer's entry in `shardcache status`, without its url."""
        return {
            "done_bytes": self.arrived_bytes,
            "total_bytes": self.total_bytes,
            "rate_bytes_per_s": self._rate_bytes_per_s(),
            "class": self.priority_class.name.lower(),
            "stage": self.stages.present.value,
            "waiters": len(self.waits),
        }

    def _rate_bytes_per_s(self) -> int:
        """Return the mean rate of the download so far; 0 while the transfer is not downloading."""
        elapsed_s = time.monotonic() - self.stages.present_since_s
        if self.stages.present is not Stage.NETWORK or elapsed_s <= 0:
            return 0
        return round(self.arrived_bytes / elapsed_s)
