"""The interface between a reader and the source of its shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Grant, LeaseRequest
from shardcache_client.order.plan import Plan


class ShardSource(Protocol):
    """A source of the shards of a plan. `session.ReaderSession`, the daemon's, documents each method.

    Attributes:
        reader: the reader that the shards are for.
        on_wait: called periodically while waiting for a shard.
    """

    on_wait: Callable[[], None] | None

    @property
    def reader(self) -> ReaderIdentity: ...  # noqa: D102

    def declare(self, plan: Plan) -> None:
        """Declare the plan to be read."""

    def extend(self) -> None:
        """Send the next piece of a plan that is sent in pieces."""

    def lease(self, position: int, *, partial: bool | None = None) -> LeaseRequest:
        """Request a shard of the plan, without waiting."""

    def wait(self, lease: LeaseRequest) -> Grant:
        """Return the grant of the shard, or of its beginning, once there is one."""

    def more(self, lease: LeaseRequest, beyond: int) -> Grant | None:
        """Return an updated grant of an arriving shard once more has arrived; None if `wait` has a new grant."""

    def release(self, lease: LeaseRequest, *, read: bool = True) -> None:
        """Release a shard."""

    def close(self) -> None:
        """Release everything."""
