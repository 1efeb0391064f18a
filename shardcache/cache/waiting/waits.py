"""A caller's wait for a shard: who waits, since when, and for which bytes.

Each request for a shard or a range makes one `Wait`, which it adds to the transfer that fetches the
shard. The transfer's priority, what it fetches first, and the stall statistics come from its waits.
A lease is a reader's right to a cached shard: the shard is not evicted before the reader releases
it. A client is a job, whose readers get connections as one.
"""

import enum
from collections.abc import Callable, Collection, Hashable
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardcache.cache.waiting.stages import Stage, Stages
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.protocol import ShardRef


class PriorityClass(enum.IntEnum):
    """Priority class of a transfer. The class with the lower number goes first in every queue."""

    WAITING = 0  # a reader waits for the shard, and has nothing else to read
    PLANNED = 1  # a reader's plan has the shard
    WARM = 2  # a user's command requested the shard, such as `shardcache warm`


class PostponedError(Exception):
    """The end of a transfer that no reader waits for, as there is no space for its shard now.

    This is no failure: a plan that needs the shard will have it requested again.
    """


JobKey: TypeAlias = tuple[str, int]
"""A client: a job's name and its user's id."""


class Holder(Hashable, Protocol):
    """A reader, as the owner of a plan and of leases on shards."""

    @property
    def context(self) -> Context:
        """The context variables of the reader's session, for tasks that work for the reader."""

    @property
    def client(self) -> JobKey:
        """The reader's job."""

    def ref(self, position: int) -> ShardRef:
        """Return the shard at a position of the plan."""

    def lease_count(self) -> int:
        """Return the number of the reader's leases on shards."""

    def kept_waiting(self) -> "Collection[Holder]":
        """Return the other readers that keep their leases until this reader gets its shard.

        They are the other workers of the same loader, which returns their batches in order.
        """


@dataclass(slots=True, eq=False)
class Wait:
    """One caller's wait for a shard, for a range of it, or for more of an arriving shard.

    Attributes:
        client: the reader's job; None if the caller is not a reader.
        idle_since_s: the time from which the reader had nothing else to read, by the monotonic
            clock; None while it still has something to read.
        accepts_partial: True if the caller accepts a shard that is still arriving.
        accepts_unpublished: True if the caller accepts a shard's checked files before they are
            synced to the disk and published.
        stages: stages of the transfer, or of this wait alone if `has_own_stages`; None before the
            wait has joined a transfer. A wait for more of an arriving object has none either.
        has_own_stages: True once the wait's range is in another stage than the transfer.
        holder: the reader that waits; None if the caller is not a reader.
        is_file: True if the caller wants the object's own bytes, and no samples.
        bytes: start and end of the range that is needed; None for the whole shard.
        in_order: True if the caller reads the range in order, so that its first byte ends the wait.
        ahead: start and end of the range that is probably needed next; None if not known.
        on_end: called at the end of the wait; None if there is nothing to do then.
        error: an error that ends this wait alone, while the transfer goes on for other waits; None
            if there is none.
    """

    client: JobKey | None = None
    idle_since_s: float | None = None
    accepts_partial: bool = False
    accepts_unpublished: bool = False
    stages: Stages | None = None
    has_own_stages: bool = False
    holder: Holder | None = None
    is_file: bool = False
    bytes: tuple[int, int] | None = None
    in_order: bool = False
    ahead: tuple[int, int] | None = None
    on_end: Callable[[], None] | None = None
    error: ShardcacheError | None = None

    @property
    def first_bytes(self) -> tuple[int, int] | None:
        """Start and end of the bytes whose arrival ends the wait; None if the wait is for a shard.

        For a caller that reads in order, only the first byte of the range counts.
        """
        if self.bytes is None or not self.in_order:
            return self.bytes
        start, _ = self.bytes
        return start, start + 1

    def enter(self, stage: Stage) -> None:
        """Begin a stage of this wait alone, as the transfer may be in another stage for others."""
        assert self.stages is not None  # the wait has joined a transfer
        if not self.has_own_stages:
            self.has_own_stages = True
            self.stages = Stages(self.stages.present, self.stages.present_since_s)
        if self.stages.present is not stage:
            self.stages.enter(stage)


def longest_wait(waits: Collection[Wait]) -> Wait | None:
    """Return the wait of the reader that has waited for longest; None if no reader waits."""
    waiting = [wait for wait in waits if wait.idle_since_s is not None]
    # `or 0.0` never applies: the type checker cannot know that none is None.
    return min(waiting, key=lambda wait: wait.idle_since_s or 0.0, default=None)
