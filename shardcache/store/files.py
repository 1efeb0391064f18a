"""Small file operations with the errors of a cache disk translated. All of them block: call them in a thread."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardcache.errors import CacheDirError, DiskError, DiskFailedError, DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A disk that fails, has gone, or holds nonsense; a network filesystem whose server has gone.
_FAILED = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the OSErrors of reading and writing under `path` into DiskFullError, DiskFailedError or CacheDirError."""
    try:
        yield
    except OSError as exn:
        raise disk_error(exn, path) from exn


def disk_error(exn: OSError, path: Path) -> DiskError:
    """Return what the user is told of an OSError that was met under `path`."""
    if exn.errno in _FULL:
        if _has_inodes(path.parent):
            return DiskFullError(f"no room left while writing {path} ({exn.strerror})")
        remedy = "remove files there (df -i counts them), or make the filesystem with more inodes"
        return DiskFullError(f"no inode left for {path} ({exn.strerror})", remedy=remedy)
    if exn.errno == errno.EROFS:
        remedy = "see dmesg for why it became so; then: mount -o remount,rw"
        return DiskFailedError(f"the filesystem of {path} is read-only", remedy=remedy)
    if exn.errno in _FAILED:
        return DiskFailedError(f"the disk under {path} fails ({exn.strerror})")
    remedy = "check that the cache folder is there, writable and mounted; dmesg tells of a bad disk"
    return CacheDirError(f"cannot use {path} ({exn.strerror})", remedy=remedy)


def _has_inodes(folder: Path) -> bool:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return True
    return stat.f_favail > 0 or stat.f_files == 0  # some filesystems make inodes as they are needed, and count none


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, new: Path, lines: Iterable[str]) -> None:
    """Write a text file that has, whatever happens, all of its old or all of its new lines, which are made at `new`."""
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    fsync_path(path.parent)


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
