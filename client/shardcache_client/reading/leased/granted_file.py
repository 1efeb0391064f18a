"""The file of a daemon's grant, opened."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardcache.errors import CacheDirError, CorruptShardError
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.samples import mapped_file as files

_Result = TypeVar("_Result")

# The file of a grant may be evicted, replaced or lost before it is opened, but hardly every time.
_MAX_TRIES = 5


def read_granted(
    session: Session,
    lease: LeaseRequest,
    request_again: Callable[[], LeaseRequest],
    read: Callable[[Grant], _Result],
) -> tuple[LeaseRequest, _Result]:
    """Wait for a lease, and read the file of its grant; request another if it cannot be read.

    Args:
        request_again: requests the same as `lease`.
        read: opens the file by `open_granted`, and returns a result.

    Returns:
        The lease whose file was read, and the result of `read`.

    Raises what `Session.wait` raises; CacheDirError or CorruptShardError if the files of several
    grants in a row cannot be read. The leases have then ended.
    """
    tries_left = _MAX_TRIES
    while True:
        grant = session.wait(lease)
        try:
            return lease, read(grant)
        except (CacheDirError, CorruptShardError) as exn:
            # A file that was merely evicted does not mean that this process cannot read the cache.
            is_evicted = isinstance(exn, files.ShardGoneError) and not _is_kept(lease)
            session.release(lease, read=is_evicted, damage=files.damage_of(exn))
            tries_left -= 1
            if not tries_left:
                raise
        lease = request_again()


def _is_kept(lease: LeaseRequest) -> bool:
    """Return whether the daemon keeps the granted file; a shard granted ahead may be evicted."""
    return lease.needed or not lease.is_granted_whole


def open_granted(grant: Grant) -> int:
    """Return a descriptor of a grant's file.

    Raises CorruptShardError if it is another one; CacheDirError if this process cannot read it.
    """
    path = Path(grant["path"])
    try:
        return files.open_file(path, grant["size_bytes"], grant.get("inode"))
    except CorruptShardError as exn:
        raise CorruptShardError(exn.message, url=grant["url"]) from exn
    except OSError as exn:
        raise files.unreadable(exn, path, grant["url"]) from exn


def read_span(fd: int, start: int, stop: int) -> bytes:
    """Return the bytes of an open file from `start` to `stop`, fewer at its end.

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
