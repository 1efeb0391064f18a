"""Small file operations with the errors of a cache disk translated. All of them block: call them in a thread."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from shardcache.errors import CacheDirError, DiskFullError

# A longer write makes the kernel look for huge pages to keep it in, which costs a virtual machine more than the copy.
WRITE_BYTES = 128 * 1024


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data at an offset."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the OSErrors of writing under `path` into DiskFullError or CacheDirError."""
    try:
        yield
    except OSError as exn:
        if exn.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFullError(f"no room left while writing {path} ({exn.strerror})") from exn
        raise CacheDirError(
            f"cannot write {path} ({exn.strerror})",
            remedy="check that the cache folder is there, writable and mounted; dmesg tells of a bad disk",
        ) from exn


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unlink_quietly(*paths: Path) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def size_or_zero(path: Path) -> int:
    """Return a file's size in bytes, 0 where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def free_bytes(path: Path) -> int:
    """Return what an ordinary process may still write on the filesystem of `path`. Raises CacheDirError."""
    with disk_errors(path):
        stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def total_bytes(path: Path) -> int:
    """Return the size of the filesystem of `path`."""
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize
