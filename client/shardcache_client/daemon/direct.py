"""A session without a daemon: each shard comes from the store, for this process alone.

The one place of the client that uses what the daemon is made of, and only where it was asked for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache.errors import ConfigError, ShardcacheError, ShardTimeoutError
from shardcache_client.daemon.connection import Reader
from shardcache_client.daemon.session import LOOK_UP_S, Grant, Lease, Patience, check_parent
from shardcache_client.order.plan import Plan

if TYPE_CHECKING:
    from shardcache.direct.service import Direct, Fetch

log = logging.getLogger("shardcache")


def load() -> type[Direct]:
    """Return the class that reads from stores.

    Raises ConfigError where what it needs is not installed, or its options make no sense.
    """
    try:
        from shardcache.direct.service import Direct
    except ImportError as exn:
        raise ConfigError(
            f'fallback="direct" needs the package {exn.name}, which is not installed here',
            remedy="pip install 'shardcache[daemon]' in the training image, too; or leave fallback out",
        ) from exn
    Direct.check_options()
    return Direct


class DirectSession:
    """Lends shards that it fetches itself, each only while it is in hand or next.

    What is asked for ahead is fetched ahead: the disk holds as many shards as there are leases. A shard is given whole.
    """

    def __init__(self, reader: Reader, patience: Patience) -> None:
        self.reader = reader
        self.meanwhile: Callable[[], None] | None = None
        self._patience = patience
        self._direct: Direct | None = None
        self._plan: Plan | None = None
        self._fetches: dict[Lease, Fetch] = {}

    def __repr__(self) -> str:
        return f"DirectSession({self.reader!r}, leases={len(self._fetches)}, {self._direct!r})"

    def __contains__(self, lease: Lease) -> bool:
        return lease in self._fetches

    def declare(self, plan: Plan) -> None:
        """As `Session.declare`."""
        self._plan = plan

    def lease(self, position: int) -> Lease:
        """As `Session.lease`."""
        lease = Lease(position, partial=False)
        self.take_over(lease)
        return lease

    def take_over(self, lease: Lease) -> None:
        """Begin to fetch what was to come from elsewhere."""
        assert self._plan is not None
        if self._direct is None:
            self._direct = load()()
        lease.grant = None
        self._fetches[lease] = self._direct.fetch(self._plan.shard(lease.position))

    def wait(self, lease: Lease) -> Grant:
        """As `Session.wait`; raises the errors of the store and the shard, and those of the scratch folder."""
        fetch = self._fetches[lease]
        fetch.need()
        try:
            lease.grant = self._wait(lease, fetch)
        except ShardcacheError:
            self.release(lease)
            raise
        return lease.grant

    def _wait(self, lease: Lease, fetch: Fetch) -> Grant:
        start_s = time.monotonic()
        deadline_s, report_s = start_s + self._patience.limit_s, start_s + self._patience.first_report_s
        while True:
            now_s = time.monotonic()
            leased = fetch.wait(max(0.0, min(report_s - now_s, deadline_s - now_s, LOOK_UP_S)))
            if leased is not None:
                return leased
            check_parent()
            if self.meanwhile is not None:
                self.meanwhile()
            if time.monotonic() >= deadline_s:
                raise self._timeout(lease, fetch.explain())
            if time.monotonic() >= report_s:
                log.warning(
                    "waiting for %s since %.0f s: %s", self._url(lease), time.monotonic() - start_s, fetch.explain()
                )
                report_s = time.monotonic() + self._patience.next_report_s

    def more(self, lease: Lease, beyond: int) -> Grant | None:
        """As `Session.more`: there is always all of it."""
        return lease.grant

    def release(self, lease: Lease) -> None:
        """As `Session.release`."""
        fetch = self._fetches.pop(lease, None)
        if fetch is not None:
            fetch.cancel()

    def close(self) -> None:
        """As `Session.close`."""
        if self.reader.pid == os.getpid():  # a forked child has none of it, and must not touch the futures' locks
            for lease in list(self._fetches):
                self.release(lease)
            if self._direct is not None:
                self._direct.close()
        self._fetches.clear()
        self._direct = None

    def end_if_idle(self) -> None:
        """Close the connections to stores where nothing is leased; the next lease opens them again."""
        if self._direct is not None and not self._fetches:
            self._direct.close()
            self._direct = None

    def _timeout(self, lease: Lease, reason: str) -> ShardTimeoutError:
        return ShardTimeoutError(
            f"did not come from the store within {self._patience.limit_s:g} s: {reason}",
            url=self._url(lease),
            remedy="mend that cause, or raise ShardDataset's timeout_s",
        )

    def _url(self, lease: Lease) -> str:
        assert self._plan is not None
        return self._plan.shard(lease.position).url
