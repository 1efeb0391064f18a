"""Mapping of cached files into memory."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from shardcache.errors import CacheDirError, CorruptShardError

_OWN_FILES = Path("/proc/self/fd")


class ShardGoneError(CacheDirError):
    """A file named by the daemon does not exist: it was evicted again, or this process cannot see the cache."""

    code = "shard_gone"


def map_file(path: Path, size_bytes: int, inode: int | None = None, *, in_order: bool = True) -> mmap.mmap:
    """Map a file for reading, checking its size and, if given, its inode.

    Raises CorruptShardError if the size differs, OSError if the file cannot be read or has another inode.
    """
    # No file in the cache folder is a link. The /proc/self/fd path of a nameless file is one.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_nameless(path) else os.O_NOFOLLOW))
    try:
        stat = os.fstat(fd)
        if inode not in (None, stat.st_ino):
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", str(path))
        if stat.st_size != size_bytes:
            raise CorruptShardError(f"{path} has {stat.st_size} bytes instead of {size_bytes}")
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if in_order:
        mapped.madvise(mmap.MADV_SEQUENTIAL)  # the file may not be in the page cache
    return mapped


def is_nameless(path: Path) -> bool:
    """Return True for an open file of this process that no other process can find."""
    return path.parent == _OWN_FILES


def unreadable(exn: OSError, path: Path, url: str) -> CacheDirError:
    """Return the error for a cached file that cannot be opened or mapped."""
    kind = ShardGoneError if isinstance(exn, FileNotFoundError) else CacheDirError
    message = f"this process cannot read {exn.filename or path} ({exn.strerror})"
    if exn.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        remedy = "raise the limits on open files (ulimit -n) and mappings (vm.max_map_count), or hold fewer shards"
        return kind(message, url=url, remedy=remedy)
    return kind(
        message,
        url=url,
        remedy="in a container, mount the cache folder at the same path as for the daemon; "
        "otherwise, add the user to the folder's group",
    )
