"""Detection of files that any process on this node still has open or mapped.

The kernel grants a write lease (fcntl(2), F_SETLEASE) only on a file that no other process has open, including mappings
and across containers. This finds readers that lost their connection but kept their mapping: their shard counts as used
until its last page can really be freed.

Only the file's owner gets such a lease, and processes with CAP_LEASE, which containers do not have by default.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from shardcache.store.disk.files import is_exhaustion


def is_open_elsewhere(path: Path) -> bool:
    """Return True if another process may have `path` open or mapped; False if the filesystem cannot tell."""
    return ask_openness(path) is not False


def ask_openness(path: Path) -> bool | None:
    """Return True if another process has `path` open, False if not or if the filesystem cannot tell.

    Return None if the kernel does not reveal it, because another user owns the file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
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
