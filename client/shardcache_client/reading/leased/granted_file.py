"""The file of a daemon's grant, opened and read.

A grant is the daemon's answer to a lease: it names the file that the reader may read. The readers
of ranges and of plain files use this module; shards are mapped by `LeasedShard`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardcache.shared.exceptions import CacheDirError, CorruptShardError
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.samples.mapped_file import ShardGoneError, damage_of, open_file, unreadable

_Result = TypeVar("_Result")

# Maximum number of grants that are tried. A grant's file may be evicted, replaced or lost before it
# is opened, but hardly five times in a row.
_MAX_TRIES = 5


def read_granted(
    session: Session,
    lease: LeaseRequest,
    request_again: Callable[[], LeaseRequest],
    read: Callable[[Grant], _Result],
) -> tuple[LeaseRequest, _Result]:
    """Wait for a lease, and read the file of its grant; request again if it cannot be read.

    Args:
        lease: what to read.
        request_again: requests what `lease` requests, and returns the new lease.
        read: opens a grant's file by `open_granted`, and returns a result.

    Returns:
        The lease whose file was read, and the result of `read`.

    Raises any error of `Session.wait`; CacheDirError or CorruptShardError if the files of several
    grants in a row cannot be read. The leases have then ended.
    """
    tries_left = _MAX_TRIES
    while True:
        grant = session.wait(lease)
        try:
            return lease, read(grant)
        except (CacheDirError, CorruptShardError) as exn:
            # The session counts unreadable files, and changes to a private daemon after several. A
            # file that has gone since its grant, before the reader needed it, does not count: it
            # does not show that this process cannot read the cache. A whole shard may be evicted in
            # this time; the file of an object's parts is published if the whole is fetched.
            has_gone = isinstance(exn, ShardGoneError) and not lease.needed
            session.release(lease, unreadable=not has_gone, damage=damage_of(exn))
            tries_left -= 1
            if not tries_left:
                raise
        lease = request_again()


def open_granted(grant: Grant) -> int:
    """Return a descriptor of a grant's file, to be closed by the caller.

    Raises ShardGoneError if the file has gone since the grant, also if another file has its path;
    CacheDirError if this process cannot read the file for another reason; CorruptShardError if the
    file is damaged.
    """
    path = Path(grant["path"])
    try:
        return open_file(path, grant["size_bytes"], grant.get("inode"))
    except CorruptShardError as exn:
        raise CorruptShardError(exn.message, url=grant["url"]) from exn
    except OSError as exn:
        raise unreadable(exn, path, grant["url"]) from exn


def read_span(fd: int, start: int, stop: int) -> bytes:
    """Return the bytes of an open file from `start` to `stop`, or up to the end of the file.

    Raises OSError.
    """
    pieces: list[bytes] = []
    while start < stop:
        # Linux reads less than 2 GiB per call, however many bytes are asked for.
        piece = os.pread(fd, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
