"""Files of cached shards, opened and mapped.

The daemon leases a shard to a reader, which keeps the shard from being evicted, and sends the path
of the shard's file in the cache folder. The reader opens this file itself and maps it into memory.
It checks the size and the inode, as the file may have been replaced or damaged.

A nameless file is in no folder: this process has it open already, and opens it once more by the
path of its descriptor in `/proc/self/fd`.
"""

import errno
import mmap
import os
from pathlib import Path

from shardcache.shared.exceptions import CacheDirError, CorruptShardError, TokensError

_OWN_DESCRIPTORS = Path("/proc/self/fd")  # the folder of this process's open files
# Errors of a damaged file or disk. Every process that reads the file gets the same error.
_DAMAGE_ERRNOS = (
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.EUCLEAN,
    errno.EBADMSG,
    errno.ENODATA,
    errno.EREMOTEIO,
)


class ShardGoneError(CacheDirError, code="shard_gone"):
    """A file named by the daemon does not exist: it was evicted, or the cache is not visible."""


def open_file(path: Path, size_bytes: int, inode: int | None = None) -> int:
    """Open a file for reading and return its descriptor.

    Args:
        path: path of the file.
        size_bytes: size that the file must have.
        inode: inode that the file must have; None for any.

    Raises CorruptShardError if the size is another one, and OSError if the file cannot be read or
    has another inode.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    # The daemon makes no links in the cache folder, so links are not followed. The path of a
    # nameless file is a link in /proc/self/fd, which must be followed.
    if not is_nameless(path):
        flags |= os.O_NOFOLLOW
    fd = os.open(path, flags)
    stat = os.fstat(fd)
    is_expected_file = inode is None or inode == stat.st_ino
    if is_expected_file and stat.st_size == size_bytes:
        return fd

    os.close(fd)
    if not is_expected_file:
        raise FileNotFoundError(errno.ENOENT, "another file has taken its place", str(path))
    raise CorruptShardError(f"{path} has {stat.st_size} bytes instead of {size_bytes}")


def map_file(
    path: Path,
    size_bytes: int,
    inode: int | None = None,
    *,
    in_order: bool = True,
) -> mmap.mmap:
    """Map a file for reading.

    For the other arguments and the errors, see `open_file`.

    Args:
        in_order: True if the file is read from its beginning to its end.
    """
    fd = open_file(path, size_bytes, inode)
    try:
        # An empty file cannot be mapped. One byte of anonymous memory, which has -1 in place of a
        # descriptor, stands for it; this byte is never read.
        if not size_bytes:
            return mmap.mmap(-1, 1, prot=mmap.PROT_READ)
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if in_order:
        # The kernel then reads further ahead, which matters if the file is not in the page cache.
        mapped.madvise(mmap.MADV_SEQUENTIAL)
    return mapped


def damage_of(exn: Exception) -> str:
    """Return the message of an error that reports a damaged file; "" for any other error."""
    if isinstance(exn, CorruptShardError | TokensError):
        return exn.message
    return ""


def is_nameless(path: Path) -> bool:
    """Return True for a file that this process has open, and that has no name in any folder."""
    return path.parent == _OWN_DESCRIPTORS


def unreadable(exn: OSError, path: Path, url: str) -> CacheDirError | CorruptShardError:
    """Return the error for a cached file that cannot be opened or mapped.

    Args:
        exn: the error of opening or mapping the file.
        path: path of the file.
        url: url of the shard.
    """
    if exn.errno in _DAMAGE_ERRNOS:
        return CorruptShardError(
            f"the cached file {exn.filename or path} cannot be read ({exn.strerror})", url=url
        )
    # If this process or the machine has no descriptor or mapping left, the file itself is good.
    if exn.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        remedy = (
            "raise the limits on open files (ulimit -n) and mappings (vm.max_map_count), or hold "
            "fewer shards"
        )
    else:
        remedy = (
            "in a container, mount the cache folder at the same path as for the daemon; otherwise, "
            "add the user to the folder's group"
        )
    error_class = ShardGoneError if isinstance(exn, FileNotFoundError) else CacheDirError
    message = f"this process cannot read {exn.filename or path} ({exn.strerror})"
    return error_class(message, url=url, remedy=remedy)
