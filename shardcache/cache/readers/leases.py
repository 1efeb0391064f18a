"""Leases of readers on shards.

A lease begins as a request for the shard at one position of the reader's plan. It is granted once
the shard, its beginning or the wanted range is in the cache. It is in use once the reader has
reached the shard, which is then retained: it is not evicted before the reader releases the lease.
The parts of a range are retained from the grant on, and a lease on them is never in use.
`Reader` takes leases from one state to the next.
"""

import asyncio
import enum
from dataclasses import dataclass, field

from shardcache.cache.readers.held_ranges import HeldRange
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.waits import Wait
from shardcache.shared.exceptions import CorruptShardError
from shardcache.store.shard import Facts, Shard, UnpublishedFiles

# A loader that waits for one worker requests at most a few more batches of each other worker. The
# daemon does not know torch's `prefetch_factor`, 2 by default, and assumes fewer batches than this.
_MAX_BATCHES_AHEAD = 4

OF_A_PREVIOUS_PLAN = -1
"""`Lease.position` once the reader has declared another plan."""


class LeaseState(enum.Enum):
    """State of a lease.

    A lease that is granted before the reader has reached the shard does not keep the shard in the
    cache. The shard is protected only by its place in the plan, and is evicted if a waiting reader
    needs the space. The reader then finds no file, and requests the shard again.
    """

    REQUESTED = enum.auto()  # the reader still has other shards to read
    AWAITED = enum.auto()  # the shard is requested, and the reader has nothing else to read
    GRANTED = enum.auto()  # the reader has not reached the shard yet
    IN_USE = enum.auto()  # the reader has reached the shard, which is retained once it is published
    EVICTED = enum.auto()  # the lease was granted, but the reader reached the shard too late


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's lease on a shard, from its request on.

    Attributes:
        number: id of the request, which the reader chooses.
        position: position of the shard in the reader's plan.
        wait: the wait that ends when the lease is granted.
        state: the present state.
        granted: the shard, early access to it, or a range of it; None until the lease is granted.
        range_number: number of the range in the order that the reader has announced; None for a
            lease on a whole shard, and for a range that was not announced.
        files: the checked files of the whole shard, if they were granted before its publication.
        is_damage_noted: True once damage of the shard is among the reports to the reader.
        task: the task that waits for the shard, which is the task that creates the lease. It is
            cancelled if the reader withdraws the request. None for a lease that was granted without
            waiting.
    """

    number: int
    position: int
    wait: Wait
    state: LeaseState = LeaseState.REQUESTED
    granted: Shard | Arrival | HeldRange | None = None
    range_number: int | None = None
    files: UnpublishedFiles | None = None
    is_damage_noted: bool = False
    task: asyncio.Task[None] | None = field(default_factory=asyncio.current_task, repr=False)

    @property
    def shard(self) -> Shard | None:
        """The published shard; None until there is one."""
        if isinstance(self.granted, Shard):
            return self.granted
        if isinstance(self.granted, Arrival):
            return self.granted.shard
        return None

    @property
    def facts(self) -> Facts | None:
        """The facts about the whole shard; None until the shard has passed every check."""
        if self.shard is not None:
            return self.shard.facts
        files = self.files
        if files is None and isinstance(self.granted, Arrival):
            files = self.granted.files
        return None if files is None else files.facts

    @property
    def is_whole(self) -> bool:
        """True if the whole shard is granted, published or not.

        A shard may be published as a plain file, which has no index. For a reader of samples, this
        is False until the shard has been indexed.
        """
        if self.shard is None and self.files is None:
            return False
        if self.wait.is_file or not isinstance(self.granted, Arrival):
            return True
        has_index = self.facts is None or self.facts.samples is not None
        return has_index

    @property
    def retained(self) -> Shard | None:
        """The shard, if it is retained for the reader; None otherwise."""
        return self.shard if self.state is LeaseState.IN_USE else None

    @property
    def damage(self) -> CorruptShardError | None:
        """Damage found in the shard that the reader has in use; None if there is none."""
        if self.retained is not None:
            return self.retained.damage
        if isinstance(self.granted, Arrival):
            return self.granted.damage
        return None


def outlasts_batches(shard: Shard, batch_size: int) -> bool:
    """Return whether a shard has more samples than a loader requests of a worker ahead.

    False if the number of the shard's samples is not known.

    Args:
        batch_size: number of samples in a batch of the loader.
    """
    few_samples = batch_size * _MAX_BATCHES_AHEAD
    return shard.facts is not None and (shard.facts.samples or 0) > few_samples
