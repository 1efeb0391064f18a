"""Leases of readers on shards."""

import asyncio
import enum
from dataclasses import dataclass, field

from shardcache.cache.readers.held_ranges import HeldRange
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.waits import Wait
from shardcache.errors import CorruptShardError
from shardcache.store.shard import Facts, Shard, Unpublished


class LeaseState(enum.Enum):
    """State of a lease.

    A lease granted ahead of need does not keep the shard in the cache: only the plan protects it,
    unless a waiting reader needs the space. The reader then finds no file, and asks again.
    """

    REQUESTED = enum.auto()
    AWAITED = enum.auto()  # requested, and the reader has nothing else to read
    GRANTED = enum.auto()  # before the reader has reached the shard
    IN_USE = enum.auto()  # the reader has reached the shard, which is retained once published
    EVICTED = enum.auto()  # granted, and evicted before the reader reached it


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's lease on a shard, from its request on."""

    number: int  # id of the request
    position: int  # in the reader's plan
    wait: Wait  # until the lease is granted
    state: LeaseState = LeaseState.REQUESTED
    # The shard, early access to it, or a range of it; None until one of them is granted.
    granted: Shard | Arrival | HeldRange | None = None
    # Those of the whole shard, if they were granted before its publication.
    files: Unpublished | None = None
    damage_seen: bool = False  # True once damage of the shard was noted
    # The task that waits for the shard; cancelled if the reader withdraws the request.
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
        """The facts about the whole shard; None until it has passed every check."""
        if self.shard is not None:
            return self.shard.facts
        files = self.files
        if files is None and isinstance(self.granted, Arrival):
            files = self.granted.files
        return None if files is None else files.facts

    @property
    def is_whole(self) -> bool:
        """True if the whole shard is granted, published or not.

        False while a shard that was published as a file has yet to be indexed for this reader.
        """
        lacks_index = self.facts is not None and self.facts.samples is None
        if isinstance(self.granted, Arrival) and lacks_index and not self.wait.is_file:
            return False
        return self.shard is not None or self.files is not None

    @property
    def retained(self) -> Shard | None:
        """The shard, if it is retained for the reader."""
        return self.shard if self.state is LeaseState.IN_USE else None

    @property
    def damage(self) -> CorruptShardError | None:
        """Damage found in what the reader has in use."""
        if self.retained is not None:
            return self.retained.damage
        if isinstance(self.granted, Arrival):
            return self.granted.damage
        return None


def has_more_samples(shard: Shard, count: int) -> bool:
    """Return whether a shard is known to have more than a number of samples."""
    return shard.facts is not None and (shard.facts.samples or 0) > count
