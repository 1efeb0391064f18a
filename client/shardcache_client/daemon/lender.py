"""The seam between a reader and where its shards come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shardcache_client.daemon.connection import Reader
from shardcache_client.daemon.session import Grant, Lease
from shardcache_client.order.plan import Plan


class Lender(Protocol):
    """Lends the shards of a plan; `session.Session` says what each method means, and lends the daemon's.

    Attributes:
        reader: for whom.
        meanwhile: called now and then while a shard is waited for.
    """

    meanwhile: Callable[[], None] | None

    @property
    def reader(self) -> Reader: ...  # noqa: D102

    def declare(self, plan: Plan) -> None:
        """Say what will be read."""

    def extend(self) -> None:
        """Say more of it, where it goes in pieces."""

    def lease(self, position: int, *, partial: bool | None = None) -> Lease:
        """Ask for a shard of the plan, without waiting."""

    def wait(self, lease: Lease) -> Grant:
        """Return where the shard, or its beginning, lies."""

    def more(self, lease: Lease, beyond: int) -> Grant | None:
        """Return the grant of an arriving shard anew, once more of it is there; None where `wait` has another."""

    def release(self, lease: Lease, *, read: bool = True) -> None:
        """Give a shard back."""

    def close(self) -> None:
        """Give everything back."""
