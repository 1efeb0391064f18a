"""`fallback="direct"`: a reader that goes on without the daemon, straight from the store, and back to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from shardcache.errors import CacheDirError, CacheError, NoDaemonError, ShardcacheError, VersionMismatchError
from shardcache_client.daemon import connection
from shardcache_client.daemon.connection import Reader
from shardcache_client.daemon.direct import DirectSession, load
from shardcache_client.daemon.health import health, listens
from shardcache_client.daemon.session import Grant, Lease, Patience, Session
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.plan import Plan

log = logging.getLogger("shardcache")

# What says that the cache cannot, not that nobody may or that the store cannot: only that is read past.
_CACHE_SIDE = (CacheError, NoDaemonError, VersionMismatchError)
# A restart takes a daemon some two seconds.
_GRACE_S = 10.0
# The first try with the daemon again; as often as it fails at once, the next comes after twice as long.
_RETRY_S = 10.0
_MOST_RETRY_S = 300.0
# The one before may have lost its place to a shard that was needed sooner, as may happen to any.
_UNREADABLE = 2


class FallbackSession:
    """Asks the daemon, and gets from the store by itself what the daemon cannot give.

    Positions of one plan are leased and read in the same order whoever lends them, so nothing is lost or repeated at a
    change. What the daemon lent before stays mapped, which the daemon respects. Only errors of the cache lead here: of
    the store's, and of what the daemon refuses, the reader is told as ever.

    Args:
        partial_reads: as `Session` takes it.
        grace_s: how long to wait for a daemon that went away, or does not answer. One that a new session does not find
            is not waited for.
        retry_s: after how long the daemon is asked again.
    """

    def __init__(
        self,
        socket: Path,
        reader: Reader,
        patience: Patience,
        *,
        partial_reads: bool = False,
        grace_s: float = _GRACE_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.reader = reader
        self.meanwhile: Callable[[], None] | None = None
        self._socket = socket
        self._grace_s = grace_s
        self._retry_s = self._pause_s = retry_s
        brief = replace(patience, away_s=grace_s)
        self._session = Session(socket, reader, brief, partial_reads=partial_reads)
        self._direct = DirectSession(reader, patience)
        self._plan: Plan | None = None
        self._session.meanwhile = self._look_up
        self._direct.meanwhile = self._tell_meanwhile
        self._met = False  # whether the daemon ever took a plan from this session
        self._back_at_s: float | None = None  # when the daemon is asked again; None while it lends
        self._asked_s = self._heard_s = 0.0  # when, of one wait, the daemon was last asked how it is, and last said it
        self._unreadable = (-1, 0)  # which position's file could not be read last, and how often
        self._past = 0  # shards of this epoch that were read past the daemon

    def __repr__(self) -> str:
        return f"FallbackSession({self._session!r}, {self._direct!r}, direct={self._back_at_s is not None})"

    def declare(self, plan: Plan) -> None:
        """As `Session.declare`, of whoever lends."""
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
        """As `Session.extend`."""
        if self._back_at_s is None:
            self._session.extend()

    def lease(self, position: int, *, partial: bool | None = None) -> Lease:
        """As `Session.lease`, of whoever lends from now on."""
        assert self._plan is not None
        if self._unreadable == (position, _UNREADABLE):
            self._leave(CacheDirError("what the daemon lends cannot be read here", url=self._plan.shard(position).url))
        if self._back_at_s is None:
            return self._session.lease(position, partial=partial)
        if not self._is_well_again():
            return self._direct.lease(position)
        lease = self._session.lease(position, partial=partial)  # first: the plan is declared from there on
        self._begin(self._plan)
        if self._back_at_s is None:
            log.info("the daemon at %s is well again, and lends the shards from here on", self._socket)
        else:
            self._direct.take_over(lease)
        return lease

    def wait(self, lease: Lease) -> Grant:
        """As `Session.wait`; raises the store's errors, and those of the cache where this process has them itself."""
        if lease.grant is not None:
            return lease.grant
        if lease in self._session:
            try:
                return self._wait(lease)
            except _CACHE_SIDE as exn:
                self._leave(exn)
        if lease not in self._direct:  # nor is one that was asked for ahead of a daemon that is gone, or back
            self._direct.take_over(lease)
        grant = self._direct.wait(lease)
        self._past += 1
        return grant

    def _wait(self, lease: Lease) -> Grant:
        self._asked_s = self._heard_s = time.monotonic()
        grant = self._session.wait(lease)
        self._pause_s = self._retry_s
        return grant

    def more(self, lease: Lease, beyond: int) -> Grant | None:
        """As `Session.more`."""
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

    def release(self, lease: Lease, *, read: bool = True) -> None:
        """As `Session.release`, to whoever lent it."""
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
        """As `Session.close`."""
        self._plan = None
        self._session.close()
        self._direct.close()

    def _leave(self, exn: ShardcacheError) -> None:
        """Do without the daemon for a while: it forgets what it was asked for, and keeps what is mapped."""
        self._session.close()
        self._unreadable = (-1, 0)
        self._back_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MOST_RETRY_S)
        where = f" ({exn.url})" if exn.url else ""
        log.warning("%s%s; this process reads from the store itself until the daemon can", exn.message, where)

    def _is_well_again(self) -> bool:
        now_s = time.monotonic()
        if self._back_at_s is None or now_s < self._back_at_s:
            return False
        self._back_at_s = now_s + self._retry_s
        return health(self._socket) == "ok"

    def _look_up(self) -> None:
        """Raise NoDaemonError when the daemon that lends has said nothing for the time of grace, not even how it is."""
        self._tell_meanwhile()
        now_s = time.monotonic()
        if now_s - self._asked_s < self._grace_s / 2:
            return
        answer = health(self._socket)
        self._asked_s = time.monotonic()
        if answer is not None:
            self._heard_s = self._asked_s
        elif self._asked_s - self._heard_s > self._grace_s:
            raise NoDaemonError(f"the daemon has not answered for {self._grace_s:g} s", url=str(self._socket))

    def _tell_meanwhile(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()

    def _report(self, epoch: int) -> None:
        if self._past:
            log.warning("epoch %d: %d shards were read straight from the store, past the daemon", epoch, self._past)
        self._past = 0


def resolve_past(socket: Path, reader: Reader, urls: Sequence[str], timeout_s: float) -> Manifest:
    """Do what `connection.resolve` does, by asking the store where the daemon cannot; raises what either does."""
    try:
        return connection.resolve(socket, reader, urls, timeout_s, away_s=_GRACE_S)
    except _CACHE_SIDE as exn:
        where = f" ({exn.url})" if exn.url else ""
        log.warning("%s%s; the shards are listed straight from the store", exn.message, where)
    with closing(load()()) as direct:
        return Manifest(tuple(direct.resolve(urls, timeout_s)), counts_listed=True)
