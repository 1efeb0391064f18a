"""A session without a daemon: each shard comes from the origin, for this process alone.

The only module of the client that imports the daemon's code, and only for `fallback="direct"`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache.errors import ConfigError, ShardcacheError
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Grant, LeaseRequest, Patience
from shardcache_client.order.plan import Plan

if TYPE_CHECKING:
    from shardcache.direct.service import Direct, Fetch


def load() -> type[Direct]:
    """Return the class that reads from origins.

    Raises ConfigError if a package that it needs is not installed, or its options are invalid.
    """
    try:
        from shardcache.direct.service import Direct
    except ImportError as exn:
        raise ConfigError(
            f'fallback="direct" needs the package {exn.name}, which is not installed here',
            remedy="pip install 'shardcache[daemon]' in the training image as well; or omit fallback",
        ) from exn
    Direct.check_options()
    return Direct


class DirectSession:
    """Leases shards that this process fetches itself, and keeps each only until its release.

    A shard leased ahead is fetched ahead: the disk holds as many shards as there are leases. Shards are granted whole.
    """

    def __init__(self, reader: ReaderIdentity, patience: Patience) -> None:
        self.reader = reader
        self.on_wait: Callable[[], None] | None = None
        self._patience = patience
        self._direct: Direct | None = None
        self._plan: Plan | None = None
        self._fetches: dict[LeaseRequest, Fetch] = {}

    def __repr__(self) -> str:
        return f"DirectSession({self.reader!r}, leases={len(self._fetches)}, {self._direct!r})"

    def __contains__(self, lease: LeaseRequest) -> bool:
        return lease in self._fetches

    def declare(self, plan: Plan) -> None:
        """As `Session.declare`."""
        self._plan = plan

    def lease(self, position: int) -> LeaseRequest:
        """As `Session.lease`."""
        lease = LeaseRequest(position, partial=False)
        self.take_over(lease)
        return lease

    def take_over(self, lease: LeaseRequest) -> None:
        """Begin to fetch the shard of a lease that another session made."""
        assert self._plan is not None
        if self._direct is None:
            self._direct = load()()
        lease.grant = None
        self._fetches[lease] = self._direct.fetch(self._plan.shard(lease.position))

    def wait(self, lease: LeaseRequest) -> Grant:
        """As `Session.wait`; raises errors of the origin, the shard and the scratch folder."""
        assert self._plan is not None
        fetch = self._fetches[lease]
        fetch.need()
        try:
            lease.grant = self._patience.wait(
                self._plan.shard(lease.position).url,
                lambda until_s: fetch.wait(max(0.0, until_s - time.monotonic())),
                fetch.explain,
                self.on_wait,
                remedy="fix that cause, or raise timeout_s",
            )
        except ShardcacheError:
            self.release(lease)
            raise
        return lease.grant

    def more(self, lease: LeaseRequest, beyond: int) -> Grant | None:
        """As `Session.more`; the shard is always whole."""
        return lease.grant

    def release(self, lease: LeaseRequest) -> None:
        """As `Session.release`."""
        fetch = self._fetches.pop(lease, None)
        if fetch is not None:
            fetch.cancel()

    def close(self) -> None:
        """As `Session.close`."""
        if self.reader.pid == os.getpid():  # a forked child owns none of this, and must not touch the futures' locks
            for lease in list(self._fetches):
                self.release(lease)
            if self._direct is not None:
                self._direct.close()
        self._fetches.clear()
        self._direct = None

    def end_if_idle(self) -> None:
        """Close the connections to origins if nothing is leased; the next lease opens them again."""
        if self._direct is not None and not self._fetches:
            self._direct.close()
            self._direct = None
