"""Detection of files that another process has open. All functions block."""

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

_own_reads: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
_own_reads_change = threading.Lock()


def own_read(path: Path) -> threading.Lock:
    """Return the lock of a file, to be held while this process has the file open for a short read.

    A removal waits for it: the kernel does not tell this process's own reads from others'.
    """
    with _own_reads_change:
        return _own_reads.setdefault(path, threading.Lock())


def is_open_elsewhere(path: Path) -> bool:
    """Return True if another process may have `path` open or mapped; False if nothing can tell.

    Readers that have lost their connection keep their mapping: their shard counts as used, too.
    """
    return ask_openness(path) is not False


def ask_openness(path: Path) -> bool | None:
    """Return whether another process has `path` open, or it has another hard link.

    The kernel grants a write lease (fcntl(2), F_SETLEASE) only on a file that no other process has
    open, mappings included and across containers, and only to its owner or with CAP_LEASE, which
    containers do not have by default.

    Returns:
        False also where nothing can tell; None if another user owns the file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_nlink > 1:
            return True
        # If a process opens the file right now, the kernel breaks the lease by a signal. SIGURG is
        # ignored by default; SIGIO would kill this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except PermissionError:
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
    """Return True if a new file of this process has another owner than the open file `fd`.

    It is made in `folder`. The process's own user id would not do: some filesystems report one
    owner for all files.
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
    """Remove files, and return True; False if another process has the first of them open.

    Unlinking an open file would not free its bytes, and they would not be accounted for. Raises
    DiskError.
    """
    with own_read(paths[0]), disk_errors(paths[0]):
        with suppress(FileNotFoundError):
            if is_open_elsewhere(paths[0]):
                return False
        unlink_quietly(*paths)
    return True
