"""Translation of a disk's OSErrors into errors of the cache.

Code that accesses the cache folder does so within `disk_errors`, or within `damage_errors` when it
reads a published file. A file is published once its shard has passed every check, so that readers
may get it. A published file that cannot be read is damaged, and can be fetched again.

An error is an exhaustion if the process or the system lacks a resource, such as file descriptors.
It says nothing about the file or its disk.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from shardcache.shared import exceptions

_FULL = (errno.ENOSPC, errno.EDQUOT)

# The disk is failing, was removed, or has a corrupt filesystem; or the server of a network
# filesystem is gone.
_FAILED = (
    errno.EIO,
    errno.ENXIO,
    errno.ENODEV,
    errno.EUCLEAN,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EREMOTEIO,
)

# The process or the system has reached a limit, or the call was interrupted.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EINTR, errno.EAGAIN)


def is_exhaustion(exn: OSError) -> bool:
    """Return whether an error is an exhaustion, as defined in the module's docstring."""
    return exn.errno in _EXHAUSTED


@contextlib.contextmanager
def damage_errors(path: Path, url: str | None = None) -> Iterator[None]:
    """Translate OSErrors from reading a published file in the block, except FileNotFoundError.

    The caller decides whether a missing file is damage: its shard may have been evicted.

    Args:
        path: path of the file.
        url: the shard's url, for errors; None if it is unknown.

    Raises CorruptShardError, ExhaustedError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exn:
        if is_exhaustion(exn):
            raise disk_error(exn, path) from exn
        raise exceptions.CorruptShardError(
            f"the cached file {path} cannot be read ({exn.strerror})",
            url=url,
        ) from exn


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Translate OSErrors from reading or writing under `path` in the block.

    Raises DiskError, ExhaustedError.
    """
    try:
        yield
    except OSError as exn:
        raise disk_error(exn, path) from exn


def disk_error(exn: OSError, path: Path) -> exceptions.CacheError:
    """Return the error to report for an OSError that occurred under `path`."""
    if is_exhaustion(exn):
        return exceptions.ExhaustedError(f"the daemon cannot open or read {path} ({exn.strerror})")
    if exn.errno in _FULL:
        if _has_inodes(path.parent):
            return exceptions.DiskFullError(f"no space left while writing {path} ({exn.strerror})")
        return exceptions.DiskFullError(
            f"no inodes left for {path} ({exn.strerror})",
            remedy="remove files there (df -i counts them), or recreate the filesystem with more "
            "inodes",
        )
    if exn.errno == errno.EFBIG:
        return exceptions.DiskFullError(
            "a file would be larger than the daemon may write, or than its filesystem holds: "
            f"{path}",
            remedy="start the daemon with: ulimit -f unlimited; or write smaller shards",
        )
    if exn.errno == errno.EROFS:
        return exceptions.DiskFailedError(
            f"the filesystem of {path} is read-only",
            remedy="see dmesg for the reason; then: mount -o remount,rw",
        )
    if exn.errno in _FAILED:
        return exceptions.DiskFailedError(f"the disk under {path} is failing ({exn.strerror})")
    return exceptions.CacheDirError(
        f"cannot use {path} ({exn.strerror})",
        remedy="check that the cache folder exists, is writable and mounted; see dmesg for disk "
        "errors",
    )


def _has_inodes(folder: Path) -> bool:
    """Return True unless the filesystem is known to have no free inode."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return True
    # Some filesystems allocate inodes on demand, and report that they have none (f_files == 0).
    return stat.f_favail > 0 or stat.f_files == 0
