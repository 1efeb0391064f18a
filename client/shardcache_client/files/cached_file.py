"""A whole object of any kind as a file, which stays cached while it is open.

- A session is one reader's connection to the daemon.
- Its plan is the numbered list of the objects that the reader reads.
- A lease is the daemon's promise that an object stays cached. Its grant has the path of the file.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

from shardcache.shared.protocol import Wanted
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.granted_file import open_granted, read_granted


class CachedFile:
    """A file of a session's plan, which stays cached until `close`. Can be used by any thread.

    Args:
        session: the session with the plan.
        position: position of the file in the session's plan.
        named: True if the path of the file has to end with the object's own name.
    """

    def __init__(self, session: Session, position: int, *, named: bool = False) -> None:
        self._session = session
        self._position = position
        self._named = named
        self._lease: LeaseRequest | None = None
        self._grant: Grant | None = None  # the grant of the open file
        self._fd = -1  # descriptor of the open file; -1 if none is open
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"CachedFile(position={self._position}, {self._grant})"

    def wait_whole(self) -> Path:
        """Wait for the whole file, and return its path.

        Raises any error of `Session.wait`; CacheDirError if this process cannot read the cache
        folder.
        """
        with self._lock:
            if self._grant is None:
                self._grant = self._wait_and_open()
            grant = self._grant
            # A daemon of an earlier release gives no path with the object's name.
            return Path(str(grant.get("named_path", grant["path"])))

    def close(self) -> None:
        """Close the file and release the lease, once no thread waits for the file.

        `wait_whole` requests another lease.
        """
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            if self._lease is not None:
                self._session.release(self._lease)
            self._fd = -1
            self._lease = None
            self._grant = None

    def _wait_and_open(self) -> Grant:
        """Wait for a lease, open its file, and return the grant."""
        first_lease = self._request_lease()
        # If the file is evicted before it is open, `read_granted` requests another lease. The grant
        # is that of the last lease.
        _, grant = read_granted(self._session, first_lease, self._request_lease, self._open)
        return grant

    def _request_lease(self) -> LeaseRequest:
        """Request a lease on the whole file."""
        self._lease = self._session.lease(self._position, partial=False, named=self._named)
        # A long plan is sent in pieces, one per lease, so that no lease waits for all of it.
        self._session.extend()
        return self._lease

    def _open(self, grant: Grant) -> Grant:
        """Open the file of a grant, and return the grant."""
        self._fd = open_granted(grant)
        return grant


@contextmanager
def session_of(
    choice: DaemonChoice,
    reader: ReaderIdentity,
    manifest: Manifest,
    wanted: Wanted,
    patience: Patience,
) -> Iterator[Session]:
    """Provide a session with a plan of everything that a manifest lists.

    Args:
        choice: the daemon.
        reader: identity under which the daemon lists the session.
        manifest: the objects, in the order of their positions in the plan.
        wanted: how the objects are read, such as "files" or "ranges"; see `Wanted`.
        patience: limits of the session's waits.
    """
    with closing(Session(choice, reader, patience)) as session:
        # The daemon shows epochs by number; 0 stands for reading outside of an epoch.
        session.declare(Plan.of(manifest, 0, range(len(manifest)), wanted=wanted))
        yield session
