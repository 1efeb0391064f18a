"""Detection of files that another process has open.

The evictor must not remove a shard that a reader still has open: that would not free its bytes, and
they would no longer be accounted for. A reader that has lost its connection to the daemon keeps its
mapping of the shard, so the daemon's own records are not enough and the kernel is asked. All
functions block.
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

# Locks by path. A lock exists only while somebody holds it or waits for it, since a
# cache may have millions of files.
_own_reads: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
_own_reads_change = threading.Lock()  # guards `_own_reads`


def own_read_lock(path: Path) -> threading.Lock:
    """Return the lock to hold while this process itself has a file open for a short read.

    `unlink_unless_open` waits for the lock. Otherwise it would find the file open, as the kernel
    does not distinguish this process's reads from those of other processes.
    """
    with _own_reads_change:
        return _own_reads.setdefault(path, threading.Lock())


def is_open_elsewhere(path: Path) -> bool:
    """Return True if another process may have `path` open or mapped.

    If the kernel's answer is not available, the result depends on the reason. It is True if another
    user owns the file, and False if the filesystem or the process's rights do not allow the
    question; see `ask_openness`.
    """
    is_open = ask_openness(path)
    return is_open is None or is_open


def ask_openness(path: Path) -> bool | None:
    """Return whether another process has `path` open, or the file has another hard link.

    The kernel is asked for a write lease on the file (fcntl(2), F_SETLEASE). Two conditions have to
    be met for a lease. No other process has the file open or mapped, even in another container. And
    this process owns the file, or has CAP_LEASE, which containers do not have by default.

    Returns:
        True or False; False also if the filesystem or the process's rights do not allow the
        question. None if the kernel does not answer because another user owns the file.
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
        # The kernel refuses a lease on another user's file. If the file is this process's own, it
        # is the process that has no right to any lease.
        if _is_other_users(fd, path.parent):
            return None
        return False
    except OSError as exn:
        if is_exhaustion(exn):
            raise
        return False
    finally:
        os.close(fd)  # also releases the lease
    return False


def _is_other_users(fd: int, folder: Path) -> bool:
    """Return True if an open file belongs to another user than this process.

    The owner is compared with that of a new file, which is made for this purpose. The process's own
    user id would not do: some filesystems report the same owner for all files.

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


def unlink_unless_open(paths: Sequence[Path]) -> bool:
    """Remove files and return True, unless another process has the first of them open.

    Return False, and remove nothing, if it has. Raises DiskError.

    Args:
        paths: first the file that readers open, then the files that belong to it.
    """
    with own_read_lock(paths[0]), disk_errors(paths[0]):
        with suppress(FileNotFoundError):
            if is_open_elsewhere(paths[0]):
                return False
        unlink_quietly(*paths)
    return True
