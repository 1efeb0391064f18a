"""The sessions of one reader: a dataset's session pool, and the identity that the reader shows.

Code that reads shards gets this object, and opens its sessions without knowing the reader.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.daemon.session_pool import SessionPool


@dataclass(frozen=True, slots=True)
class ReaderSessions:
    """Opens sessions of a reader with its daemon.

    Attributes:
        pool: the session pool of the reader's dataset.
        identity: identity under which the daemon lists the sessions.
    """

    pool: SessionPool
    identity: ReaderIdentity

    def borrow(self) -> AbstractContextManager[Session]:
        """Lend a session to an iterator; see `SessionPool.borrow`."""
        return self.pool.borrow(self.identity)

    def open(self) -> Session:
        """Return a new session, to be closed by the caller."""
        return self.pool.open(self.identity)
