"""Detection of files that another process has open.

The evictor must not remove a shard that a reader still has open: its bytes would not be freed, but
no longer be accounted for. The daemon's own records of readers are not enough, as a reader that has
lost its connection to the daemon still has the shard mapped. So the kernel is asked.

All functions block.
"""

import fcntl
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from shardcache.store.disk.disk_errors import disk_errors, is_exhaustion
from shardcache.store.disk.file_operations import unlink_quietly

# Locks by path. A lock exists only while somebody holds it or waits for it, since a cache may have
# millions of files.
_own_read_locks: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
_own_read_locks_guard = threading.Lock()  # held while `_own_read_locks` is changed


def own_read_lock(path: Path) -> threading.Lock:
    """Return the lock to hold while this process itself has a file open for a short read.

    `unlink_unless_open` waits for the lock. Otherwise it would find the file open, as the kernel
    does not distinguish this process's reads from those of other processes.
    """
    with _own_read_locks_guard:
        return _own_read_locks.setdefault(path, threading.Lock())


def unlink_unless_open(paths: Sequence[Path]) -> bool:
    """Remove files and return True, unless another process has the first of them open.

    If it has, nothing is removed, and the result is False. Raises DiskError.

    Args:
        paths: first the file that readers open, then the files that belong to it.
    """
    readable = paths[0]
    with own_read_lock(readable), disk_errors(readable):
        with suppress(FileNotFoundError):
            if is_open_elsewhere(readable):
                return False
        unlink_quietly(*paths)
    return True


def is_open_elsewhere(path: Path) -> bool:
    """Return whether another process has a file open or mapped, or the file has another hard link.

    True also if that is unknown because another user owns the file (see `ask_if_open`).
    """
    is_open = ask_if_open(path)
    return is_open is None or is_open


def ask_if_open(path: Path) -> bool | None:
    """Ask the kernel whether another process has a file open or mapped.

    The kernel is asked for a write lease on the file (fcntl(2), F_SETLEASE). It grants the lease if
    no other process has the file open or mapped, even in another container. In addition, this
    process must own the file, or have CAP_LEASE, which containers do not have by default.

    Returns:
        True if a process has the file open, or the file has another hard link. None if the kernel
        does not answer because another user owns the file. False otherwise, also if the kernel does
        not answer because of the filesystem or the process's rights.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_nlink > 1:
            return True
        # If a process opens the file while the lease is held, the kernel sends a signal to break
        # the lease. SIGURG is chosen, as it is ignored by default; the usual SIGIO would kill this
        # process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except PermissionError:
        # The kernel refuses a lease on another user's file. If the file belongs to this user, the
        # process has no right to any lease.
        if _belongs_to_another_user(fd, path.parent):
            return None
        return False
    except OSError as exn:
        if is_exhaustion(exn):
            raise
        return False
    finally:
        os.close(fd)  # also releases the lease
    return False  # the lease was granted


def _belongs_to_another_user(fd: int, folder: Path) -> bool:
    """Return whether an open file belongs to another user than this process.

    Its owner is compared with the owner of a new file, not with the process's user id: some
    filesystems report the same owner for all files.

    Args:
        fd: descriptor of the open file.
        folder: the folder in which the new file is made.
    """
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
