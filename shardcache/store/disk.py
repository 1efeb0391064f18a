"""The cache disk: file operations, the translation of its errors, open files, and mounts. All functions block."""

import contextlib
import errno
import fcntl
import grp
import os
import re
import signal
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shardcache import errors
from shardcache.units import group_name, user_name

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A disk that fails, was removed, or has a corrupt filesystem; a network filesystem whose server is gone.
_FAILED = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO)
# Limits of this process or the system, and interruptions: they say nothing about a file or its disk.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EINTR, errno.EAGAIN)

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile("nfs|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|orangefs|pvfs|fuse(?!blk)")
_OCTAL = re.compile(r"\\([0-7]{3})")


def is_exhaustion(exn: OSError) -> bool:
    """Return True for an error of the process or the system, which says nothing about the file or its disk."""
    return exn.errno in _EXHAUSTED


@contextlib.contextmanager
def damage_errors(path: Path, url: str | None = None) -> Iterator[None]:
    """Translate OSErrors from reading a published file, but FileNotFoundError: CorruptShardError, ExhaustedError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exn:
        if is_exhaustion(exn):
            raise disk_error(exn, path) from exn
        raise errors.CorruptShardError(f"the cached file {path} cannot be read ({exn.strerror})", url=url) from exn


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Translate OSErrors from reading or writing under `path` into a DiskError, or ExhaustedError."""
    try:
        yield
    except OSError as exn:
        raise disk_error(exn, path) from exn


def disk_error(exn: OSError, path: Path) -> errors.CacheError:
    """Return the error to report for an OSError that occurred under `path`."""
    if is_exhaustion(exn):
        return errors.ExhaustedError(f"the daemon cannot open or read {path} ({exn.strerror})")
    if exn.errno in _FULL:
        if _has_inodes(path.parent):
            return errors.DiskFullError(f"no space left while writing {path} ({exn.strerror})")
        remedy = "remove files there (df -i counts them), or recreate the filesystem with more inodes"
        return errors.DiskFullError(f"no inodes left for {path} ({exn.strerror})", remedy=remedy)
    if exn.errno == errno.EROFS:
        remedy = "see dmesg for the reason; then: mount -o remount,rw"
        return errors.DiskFailedError(f"the filesystem of {path} is read-only", remedy=remedy)
    if exn.errno in _FAILED:
        return errors.DiskFailedError(f"the disk under {path} is failing ({exn.strerror})")
    remedy = "check that the cache folder exists, is writable and mounted; see dmesg for disk errors"
    return errors.CacheDirError(f"cannot use {path} ({exn.strerror})", remedy=remedy)


def _has_inodes(folder: Path) -> bool:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return True
    return stat.f_favail > 0 or stat.f_files == 0  # some filesystems allocate inodes on demand and report none


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, new: Path, lines: Iterable[str]) -> None:
    """Atomically replace a text file, with `new` as the temporary file: a crash keeps all old or all new lines."""
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    fsync_path(path.parent)


def unlink_quietly(*paths: Path) -> None:
    """Remove files, ignoring those that do not exist."""
    for path in paths:
        path.unlink(missing_ok=True)


def size_or_zero(path: Path) -> int:
    """Return a file's size in bytes, or 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def free_bytes(path: Path) -> int:
    """Return the bytes that an unprivileged process can still write to the filesystem of `path`. Raises DiskError."""
    with disk_errors(path):
        stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def is_open_elsewhere(path: Path) -> bool:
    """Return True if another process may have `path` open or mapped; False if the filesystem cannot tell."""
    # Readers that lost their connection keep their mapping: their shard counts as used until it can be freed.
    return ask_openness(path) is not False


def ask_openness(path: Path) -> bool | None:
    """Return True if another process has `path` open, or a hard link to it, False if not or if nothing can tell.

    None if another user owns the file. The kernel grants a write lease (fcntl(2), F_SETLEASE) only on a file that no
    other process has open, mappings included and across containers, and only to its owner or with CAP_LEASE, which
    containers do not have by default.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_nlink > 1:
            return True
        # A process that opens the file right now breaks the lease: SIGURG is ignored by default, SIGIO kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except PermissionError:
        return None if _is_anothers(path.parent, fd) else False
    except OSError as exn:
        if is_exhaustion(exn):
            raise
        return False
    finally:
        os.close(fd)  # also releases the lease
    return False


def _is_anothers(folder: Path, fd: int) -> bool:
    """Return True if new files of this process have another owner; some filesystems report one owner for all files."""
    try:
        own_fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as exn:
        if is_exhaustion(exn):
            raise
        return False
    try:
        return os.fstat(own_fd).st_uid != os.fstat(fd).st_uid
    finally:
        os.close(own_fd)


class Mount(NamedTuple):
    """A mounted filesystem: its mount point and type."""

    folder: Path
    kind: str

    @property
    def is_network(self) -> bool:
        """True if each read may go over the network."""
        return _NETWORK.match(self.kind) is not None

    @property
    def is_memory(self) -> bool:
        """True if files take the node's memory."""
        return self.kind in ("tmpfs", "ramfs")


def mount_of(path: Path, table: Iterable[str] | None = None) -> Mount:
    """Return the filesystem of a path, which need not exist; `table` holds lines of /proc/self/mountinfo (proc(5)).

    Raises CacheDirError if there is no /proc.
    """
    lines = _mounts() if table is None else table
    place = path.resolve()
    mounts = [mount for mount in map(_parse, lines) if place.is_relative_to(mount.folder)]
    # The last filesystem mounted on a folder hides the others.
    return max(reversed(mounts), key=lambda mount: len(mount.folder.parts))


def _mounts() -> list[str]:
    try:
        return _MOUNTS.read_text().splitlines()
    except OSError as exn:
        raise errors.CacheDirError(
            f"{_MOUNTS}, which tells local disks from network filesystems, cannot be read ({exn.strerror})",
            remedy="mount -t proc proc /proc; containers have one by default",
        ) from exn


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    folder = _OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split(" ")[4])
    return Mount(Path(folder), after.split(" ", 1)[0])


def other_writers(path: Path, uid: int) -> str:
    """Return who besides a user and root may write to a folder; an empty string if nobody may.

    A group that is this user's alone, as distributions make one for each user, does not count. Nor
    does a folder with the sticky bit: others may add files there, but neither remove nor replace
    those of this user. May ask a directory server. Raises OSError.
    """
    found = path.stat()
    if found.st_uid not in (0, uid):
        return f"user {user_name(found.st_uid)}, its owner,"
    if found.st_mode & stat.S_ISVTX:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    if found.st_mode & stat.S_IWGRP and not _is_group_of_one(found.st_gid, uid):
        return f"group {group_name(found.st_gid)}"
    return ""


def _is_group_of_one(gid: int, uid: int) -> bool:
    try:
        group = grp.getgrgid(gid)
    except KeyError:  # as in a container, which has no names
        return gid == os.getegid()
    names = {user_name(uid), user_name(0)}
    return group.gr_name in names and names.issuperset(group.gr_mem)
