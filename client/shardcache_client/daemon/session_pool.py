"""Sessions lent to the iterators of a dataset.

A session is one reader's plan and leases at the daemon. An iterator borrows a session for an epoch;
the pool keeps the session for the next epoch's iterator.
"""

import atexit
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session


class SessionSettings(NamedTuple):
    """Settings of all sessions of a dataset. Pools with equal settings are interchangeable.

    Attributes:
        choice: the daemon, and whether a private daemon may replace it.
        patience: limits of the waits for the daemon and its shards.
        partial_reads: True if a shard may be granted before it has arrived whole.
    """

    choice: DaemonChoice
    patience: Patience
    partial_reads: bool


class SessionPool:
    """Lends a session to each iterator of a dataset in one process, and keeps one between epochs.

    The plan of the kept session still names the next epoch's shards, so the daemon prefetches them
    between epochs.

    Args:
        choice: the daemon, and whether a private daemon may replace it.
        patience: limits of the waits for the daemon and its shards.
        partial_reads: True if a shard may be granted before it has arrived whole.

    Attributes:
        settings: these arguments.
    """

    def __init__(self, choice: DaemonChoice, patience: Patience, partial_reads: bool) -> None:
        self.settings = SessionSettings(choice, patience, partial_reads)
        # The kept session, if there is one; a list, from which only one thread can pop it.
        self._kept: list[Session] = []

    @contextmanager
    def borrow(self, reader: ReaderIdentity) -> Iterator[Session]:
        """Lend a session to an iterator.

        If the iterator stops before its end, the session is closed, and the daemon drops its plan.
        """
        session = self._take(reader)
        session.waited_s = 0.0
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

    def _take(self, reader: ReaderIdentity) -> Session:
        """Return the kept session if its reader is this reader, or else a new session."""
        while self._kept:
            session = self._kept.pop()
            if session.reader == reader:
                return session
            # The reader differs if this process was forked, or if its rank has changed.
            session.close()
        return self.open(reader)

    def open(self, reader: ReaderIdentity) -> Session:
        """Return a new session, to be closed by the caller."""
        settings = self.settings
        return Session(
            settings.choice, reader, settings.patience, partial_reads=settings.partial_reads
        )

    @property
    def timeout_s(self) -> float:
        """Time limit of a wait for a shard."""
        return self.settings.patience.limit_s

    def __reduce__(self) -> tuple[Any, ...]:
        return SessionPool, self.settings


# Sessions that have been lent, which `_close_lent` closes when Python exits.
_lent: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_lent() -> None:
    """Close the sessions of unfinished iterators, while the modules that they need exist."""
    for session in list(_lent):
        session.close()
