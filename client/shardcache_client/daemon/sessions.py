"""The daemon sessions of one dataset in one process."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shardcache_client.daemon import connection
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.direct import load
from shardcache_client.daemon.fallback import FallbackSession, resolve_past
from shardcache_client.daemon.session import Patience, ReaderSession
from shardcache_client.daemon.source import ShardSource
from shardcache_client.order.manifest import Manifest

Fallback: TypeAlias = Literal["error", "direct"]


class SessionPool:
    """Lends a session to each iterator, and keeps one from epoch to epoch.

    The plan of the kept session still names the next epoch's shards, so the daemon prefetches them between epochs.
    """

    def __init__(self, socket: Path, patience: Patience, *, partial_reads: bool, fallback: Fallback = "error") -> None:
        self._socket = socket
        self._patience = patience
        self._partial_reads = partial_reads
        self._fallback: Fallback = fallback
        self._kept: list[ShardSource] = []  # at most one

    @contextmanager
    def borrow(self, reader: ReaderIdentity) -> Iterator[ShardSource]:
        """Lend a session to an iterator. It is closed, and its plan dropped, if the iterator stops before its end."""
        session = self._take(reader)
        _lent.add(session)
        try:
            yield session
        except BaseException:
            session.close()
            raise
        if self._kept:
            session.close()
        else:
            self._kept.append(session)

    def _take(self, reader: ReaderIdentity) -> ShardSource:
        while self._kept:
            session = self._kept.pop()
            if session.reader == reader:
                return session
            session.close()  # this process was forked, or its rank has changed
        return self.open(reader)

    def open(self, reader: ReaderIdentity) -> ShardSource:
        """Return a session of its own, to be closed by the caller."""
        kind = FallbackSession if self._fallback == "direct" else ReaderSession
        return kind(self._socket, reader, self._patience, partial_reads=self._partial_reads)

    @property
    def settings(self) -> tuple[Path, Patience, bool, Fallback]:
        """The arguments with which this object was created; equal for interchangeable ones."""
        return self._socket, self._patience, self._partial_reads, self._fallback

    @property
    def timeout_s(self) -> float:
        """Time limit of a wait for a shard."""
        return self._patience.limit_s

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(SessionPool, partial_reads=self._partial_reads, fallback=self._fallback)
        return make, (self._socket, self._patience)


_lent: weakref.WeakSet[ShardSource] = weakref.WeakSet()


@atexit.register
def _close_lent() -> None:
    """Close the sessions of iterators that a script leaves unfinished, while the modules that they need exist."""
    for session in list(_lent):
        session.close()


def resolver(fallback: Fallback) -> Callable[[Path, ReaderIdentity, Sequence[str], float], Manifest]:
    """Return the function that resolves urls to shards: `connection.resolve`, or its version with a fallback.

    Raises ConfigError if packages that the fallback needs are not installed.
    """
    if fallback == "error":
        return connection.resolve
    load()  # raises now, not on the night when the daemon goes away
    return resolve_past
