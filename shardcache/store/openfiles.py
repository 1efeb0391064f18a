"""The question whether any process on this node still has a file open or mapped.

The kernel grants a write lease (fcntl(2), F_SETLEASE) only on a file that nobody else has open, mappings included
and across containers. A reader that lost its connection, but not its mapping, is seen this way: its shard keeps
counting as used until the last page of it can really be freed.

It grants one only to the file's owner, and to processes with CAP_LEASE, which a container does not have by itself.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path


def is_open_elsewhere(path: Path) -> bool:
    """Return whether another open file or mapping of `path` may exist; False where the filesystem cannot tell."""
    return ask_openness(path) is not False


def ask_openness(path: Path) -> bool | None:
    """Return the same, but None where this process is not told because the file is another user's."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Whoever opens the file in this instant breaks the lease: SIGURG is ignored by default, SIGIO kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except PermissionError:
        return None if _is_anothers(path.parent, fd) else False
    except OSError:
        return False
    finally:
        os.close(fd)  # gives the lease back too
    return False


def _is_anothers(folder: Path, fd: int) -> bool:
    """Return whether files that this process makes have another owner: some filesystems have one owner for all."""
    try:
        own_fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return os.fstat(own_fd).st_uid != os.fstat(fd).st_uid
    finally:
        os.close(own_fd)
