"""A caller's wait for a shard: who waits, since when, and for which bytes."""

import enum
from collections.abc import Callable, Collection, Hashable
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardcache.cache.waiting.stages import Stage, Stages
from shardcache.errors import ShardcacheError
from shardcache.shared.protocol import ShardRef


class Class(enum.IntEnum):
    """Priority class of a transfer; the lower class goes first in every queue."""

    WAITING = 0  # a reader has nothing else to read
    PLANNED = 1
    WARM = 2


class PostponedError(Exception):
    """Postponed transfer: no space now for a shard that no reader waits for.

    Its plan will request it again.
    """


JobKey: TypeAlias = tuple[str, int]
"""A job's name and its user's id."""


class Holder(Hashable, Protocol):
    """A reader, as the owner of a plan and of leases on shards."""

    @property
    def context(self) -> Context:
        """The context of its session, for tasks that work for it."""

    @property
    def client(self) -> JobKey:
        """The reader's job."""

    def ref(self, position: int) -> ShardRef:
        """Return the shard at a position of the plan."""

    def leased_shards(self) -> int:
        """Return the number of shards retained for the reader."""

    def kept_waiting(self) -> "Collection[Holder]":
        """Return the readers that keep their shards until this one gets its own."""


@dataclass(slots=True, eq=False)
class Wait:
    """One caller's wait for a shard, or for more of an arriving one."""

    client: JobKey | None = None  # the reader's job
    # When the reader began to wait; None while it still has something to read.
    since_s: float | None = None
    partial: bool = False  # whether the caller accepts a shard that is still arriving
    unpublished: bool = False  # whether the caller accepts checked files before their publication
    # Stages of the transfer, once there is one; of this wait alone if its range is fetched apart.
    stages: Stages | None = None
    has_own_stages: bool = False
    holder: Holder | None = None  # the waiting reader; None if the caller is not a reader
    is_file: bool = False  # True if the object's own bytes will do, without samples
    bytes: tuple[int, int] | None = None  # start and end of the range that is needed
    in_order: bool = False  # whether the first byte of the range ends the wait
    ahead: tuple[int, int] | None = None  # start and end of the range that is probably needed next
    ended: Callable[[], None] | None = None  # called at the end of the wait
    error: ShardcacheError | None = None  # ends this wait, while the transfer goes on for others

    @property
    def first_bytes(self) -> tuple[int, int] | None:
        """Start and end of the bytes whose arrival ends the wait for a range."""
        if self.bytes is None or not self.in_order:
            return self.bytes
        start, _ = self.bytes
        return start, start + 1

    def enter(self, stage: Stage) -> None:
        """Begin a stage of its own, whatever the transfer does for others."""
        assert self.stages is not None  # it has joined a transfer
        if not self.has_own_stages:
            self.has_own_stages = True
            self.stages = Stages(self.stages.present, self.stages.present_since_s)
        if self.stages.present is not stage:
            self.stages.enter(stage)


def longest_wait(waits: Collection[Wait]) -> Wait | None:
    """Return the wait of the reader that has waited for longest; None if no reader waits."""
    waiting = [wait for wait in waits if wait.since_s is not None]
    return min(waiting, key=lambda wait: wait.since_s or 0.0, default=None)
