"""An object whose byte ranges are fetched as they are read.

A session is one reader's connection to the daemon, and its plan lists the objects that the reader
may read. A lease is the daemon's promise that what is leased stays cached. With a plan of ranges,
the reader leases byte ranges of these objects, in any order. The daemon fetches the ranges into a
file, or decides to fetch the whole object instead. The files of `open_cached` (`ObjectReader`) and
of the fsspec filesystem (`BufferedFile`) read through this module.
"""

import os
from pathlib import Path
from threading import Lock
from typing import cast

from shardcache.shared.exceptions import ShardChangedError
from shardcache.shared.protocol import Arriving
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.reading.leased.granted_file import open_granted, read_granted, read_span


class RangeFile:
    """An object of a plan of ranges, open for reading until `close`. Can be used by any thread.

    The lease on a range is released after each read, so that the cache may evict the object between
    reads. Once the daemon has the whole object, the lease on it is kept until `close`.

    Args:
        session: the session with the plan.
        position: position of the object in the session's plan.
    """

    def __init__(self, session: Session, position: int) -> None:
        self._session = session
        self._position = position
        self._fd = -1  # descriptor of the open file; -1 if none is open
        self._file_grant: Grant | None = None  # the grant of the open file
        self._whole_lease: LeaseRequest | None = None  # the lease on the whole object, once granted
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"RangeFile(position={self._position}, {self._file_grant})"

    @property
    def is_whole(self) -> bool:
        """True once a read has found the whole object cached; it stays so until `close`."""
        return self._whole_lease is not None

    def read(self, start: int, stop: int, ahead_to: int = 0) -> bytes:
        """Return the bytes from `start` to `stop`, or up to the end of the object.

        If bytes after `stop` are cached already, they are returned as well, up to `ahead_to`. No
        bytes are fetched for that, and the cache reserves no more space than for the bytes up to
        `stop`. With the default of 0, no bytes after `stop` are returned.

        Raises any error of `Session.wait`; CacheDirError if this process cannot read the cache
        folder; ShardChangedError if the object was replaced after some of its bytes were read.
        """
        with self._lock:
            if self._whole_lease is not None:
                return read_span(self._fd, start, max(stop, ahead_to))
            return self._read_leased(start, stop, ahead_to)

    def _read_leased(self, start: int, stop: int, ahead_to: int) -> bytes:
        """Lease the range, and read it; arguments as for `read`."""
        leased_range = (start, max(start + 1, stop))  # has at least one byte

        def request_range() -> LeaseRequest:
            """Request a lease on the range, for which the reader is now waiting."""
            ranges = [(self._position, leased_range)]
            (lease,) = self._session.lease_ranges(ranges, needed=True, ahead_to=ahead_to)
            return lease

        def read_file(grant: Grant) -> bytes:
            """Read the range from the file of a grant."""
            self._open(grant)
            return read_span(self._fd, start, max(stop, _ready_to(grant, ahead_to)))

        # `read_granted` requests the range again if the file is evicted before it is open.
        first_lease = request_range()
        lease, data = read_granted(self._session, first_lease, request_range, read_file)
        if lease.is_granted_whole:
            self._whole_lease = lease
        else:
            self._session.release(lease)
        return data

    def _open(self, grant: Grant) -> None:
        """Open the file of a grant, unless it is the open file already."""
        current = self._file_grant
        if current is not None and current["version"] != grant["version"]:
            raise ShardChangedError(
                "the file was replaced in the object store while being read",
                url=grant["url"],
            )
        is_open = current is not None and _file_identity(current) == _file_identity(grant)
        if is_open:
            return
        fd = open_granted(grant)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._file_grant = grant

    def close(self) -> None:
        """Close the file, and release the lease on the whole object, if there is one."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            if self._whole_lease is not None:
                self._session.release(self._whole_lease)
            self._whole_lease = None


def _ready_to(grant: Grant, ahead_to: int) -> int:
    """Return the end of the bytes that can be read without waiting, but at most `ahead_to`."""
    if grant["type"] != "arriving":  # all bytes have arrived
        return ahead_to
    return min(ahead_to, cast(Arriving, grant)["ready_bytes"])


def _file_identity(grant: Grant) -> tuple[Path, int | None]:
    """Return the path of a grant's file, and its inode if the grant has one."""
    return Path(grant["path"]), grant.get("inode")
