"""`fallback="direct"`: a reader that switches to the origin while the daemon is unusable, and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from shardcache.errors import CacheDirError, CacheError, NoDaemonError, ShardcacheError, VersionMismatchError
from shardcache_client.daemon import connection
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.direct import DirectSession, load
from shardcache_client.daemon.health import health, listens
from shardcache_client.daemon.session import Grant, LeaseRequest, Patience, ReaderSession
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.plan import Plan

log = logging.getLogger("shardcache")

# Errors of the cache itself. Refused access and errors of the origin do not lead to the fallback.
_CACHE_SIDE = (CacheError, NoDaemonError, VersionMismatchError)
# A daemon restarts in about two seconds.
_GRACE_S = 10.0
# Delay before the daemon is first tried again; doubles each time it fails immediately.
_RETRY_S = 10.0
_MOST_RETRY_S = 300.0
# Failures after which a file counts as unreadable: at the first, it may only have been evicted for a more urgent shard.
_UNREADABLE = 2


class FallbackSession:
    """Leases shards from the daemon, and fetches from the origin in this process what the daemon cannot provide.

    Positions of one plan are leased and read in the same order from either source, so no sample is lost or repeated at
    a switch. Shards leased from the daemon before a switch stay mapped, which the daemon respects. Only errors of the
    cache cause a switch: errors of the origin and refusals by the daemon reach the reader as usual.

    Args:
        partial_reads: as for `ReaderSession`.
        grace_s: how long to wait for a daemon that went away or does not answer. A new session that finds no daemon
            does not wait.
        retry_s: delay before the daemon is tried again.
    """

    def __init__(
        self,
        socket: Path,
        reader: ReaderIdentity,
        patience: Patience,
        *,
        partial_reads: bool = False,
        grace_s: float = _GRACE_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.reader = reader
        self.on_wait: Callable[[], None] | None = None
        self._socket = socket
        self._grace_s = grace_s
        self._retry_s = self._pause_s = retry_s
        brief = replace(patience, away_s=grace_s)
        self._session = ReaderSession(socket, reader, brief, partial_reads=partial_reads)
        self._direct = DirectSession(reader, patience)
        self._plan: Plan | None = None
        self._session.on_wait = self._look_up
        self._direct.on_wait = self._tell_on_wait
        self._met = False  # True once the daemon has accepted a plan from this session
        self._back_at_s: float | None = None  # when the daemon is tried again; None while it is in use
        self._asked_s = self._heard_s = 0.0  # during one wait: times of the last health request and the last answer
        self._unreadable = (-1, 0)  # position of the last file that could not be read, and number of failures
        self._past = 0  # shards of this epoch that were read without the daemon

    def __repr__(self) -> str:
        return f"FallbackSession({self._session!r}, {self._direct!r}, direct={self._back_at_s is not None})"

    def declare(self, plan: Plan) -> None:
        """As `ReaderSession.declare`, to the current source."""
        self._plan, self._unreadable = plan, (-1, 0)
        self._direct.declare(plan)
        if self._back_at_s is None or self._is_well_again():
            self._begin(plan)

    def _begin(self, plan: Plan) -> None:
        self._back_at_s = None
        try:
            if not self._met and not listens(self._socket):
                raise NoDaemonError("no daemon listens at the socket", url=str(self._socket))
            self._session.declare(plan)
            self._met = True
        except _CACHE_SIDE as exn:
            self._leave(exn)

    def extend(self) -> None:
        """As `ReaderSession.extend`."""
        if self._back_at_s is None:
            self._session.extend()

    def lease(self, position: int, *, partial: bool | None = None) -> LeaseRequest:
        """As `ReaderSession.lease`, from the source to be used from now on."""
        assert self._plan is not None
        if self._unreadable == (position, _UNREADABLE):
            self._leave(
                CacheDirError("this process cannot read the daemon's files", url=self._plan.shard(position).url)
            )
        if self._back_at_s is None:
            return self._session.lease(position, partial=partial)
        if not self._is_well_again():
            return self._direct.lease(position)
        lease = self._session.lease(position, partial=partial)  # first, as the plan is declared from this position on
        self._begin(self._plan)
        if self._back_at_s is None:
            log.info("the daemon at %s has recovered; shards come from it again", self._socket)
        else:
            self._direct.take_over(lease)
        return lease

    def wait(self, lease: LeaseRequest) -> Grant:
        """As `ReaderSession.wait`; raises errors of the origin, and errors of this process's own disk."""
        if lease.grant is not None:
            return lease.grant
        if lease in self._session:
            try:
                return self._wait(lease)
            except _CACHE_SIDE as exn:
                self._leave(exn)
        if lease not in self._direct:  # includes leases made ahead with a daemon that is gone, or gone and back
            self._direct.take_over(lease)
        grant = self._direct.wait(lease)
        self._past += 1
        return grant

    def _wait(self, lease: LeaseRequest) -> Grant:
        self._asked_s = self._heard_s = time.monotonic()
        grant = self._session.wait(lease)
        self._pause_s = self._retry_s
        return grant

    def more(self, lease: LeaseRequest, beyond: int) -> Grant | None:
        """As `ReaderSession.more`."""
        if lease in self._direct:
            return self._direct.more(lease, beyond)
        if lease in self._session:
            self._asked_s = self._heard_s = time.monotonic()
            try:
                return self._session.more(lease, beyond)
            except _CACHE_SIDE as exn:
                self._leave(exn)
        self._direct.take_over(lease)
        return None

    def release(self, lease: LeaseRequest, *, read: bool = True) -> None:
        """As `ReaderSession.release`, to the source of the lease."""
        if lease in self._direct:
            self._direct.release(lease)
            if self._back_at_s is None:
                self._direct.end_if_idle()
        else:
            if not read:
                position, times = self._unreadable
                self._unreadable = (lease.position, times + 1 if position == lease.position else 1)
            self._session.release(lease, read=read)
        if read and self._plan is not None and lease.position == self._plan.reads - 1:
            self._report(self._plan.epoch)

    def close(self) -> None:
        """As `ReaderSession.close`."""
        self._plan = None
        self._session.close()
        self._direct.close()

    def _leave(self, exn: ShardcacheError) -> None:
        """Switch to the origin for a while: the daemon drops this session's requests, and keeps mapped files."""
        self._session.close()
        self._unreadable = (-1, 0)
        self._back_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MOST_RETRY_S)
        where = f" ({exn.url})" if exn.url else ""
        log.warning("%s%s; reading directly from the object store until the daemon recovers", exn.message, where)

    def _is_well_again(self) -> bool:
        now_s = time.monotonic()
        if self._back_at_s is None or now_s < self._back_at_s:
            return False
        self._back_at_s = now_s + self._retry_s
        return health(self._socket) == "ok"

    def _look_up(self) -> None:
        """Raise NoDaemonError if the daemon in use has not answered for `grace_s`, not even a health request."""
        self._tell_on_wait()
        now_s = time.monotonic()
        if now_s - self._asked_s < self._grace_s / 2:
            return
        answer = health(self._socket)
        self._asked_s = time.monotonic()
        if answer is not None:
            self._heard_s = self._asked_s
        elif self._asked_s - self._heard_s > self._grace_s:
            raise NoDaemonError(f"the daemon has not answered for {self._grace_s:g} s", url=str(self._socket))

    def _tell_on_wait(self) -> None:
        if self.on_wait is not None:
            self.on_wait()

    def _report(self, epoch: int) -> None:
        if self._past:
            log.warning("epoch %d: %d shards were read directly from the object store", epoch, self._past)
        self._past = 0


def resolve_past(socket: Path, reader: ReaderIdentity, urls: Sequence[str], timeout_s: float) -> Manifest:
    """As `connection.resolve`, but list the shards from the origin if the daemon cannot; raises the errors of both."""
    try:
        return connection.resolve(socket, reader, urls, timeout_s, away_s=_GRACE_S)
    except _CACHE_SIDE as exn:
        where = f" ({exn.url})" if exn.url else ""
        log.warning("%s%s; listing the shards directly from the object store", exn.message, where)
    with closing(load()()) as direct:
        return Manifest(tuple(direct.resolve(urls, timeout_s)), counts_listed=True)
