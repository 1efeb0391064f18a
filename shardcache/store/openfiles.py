"""Whether any process on this node still has a file open or mapped.

The kernel grants a write lease (fcntl(2), F_SETLEASE) only on a file that nobody else has open, mappings included
and across containers. A reader that lost its connection, but not its mapping, is seen this way: its shard keeps
counting as used until the last page of it can really be freed.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path


def is_open_elsewhere(path: Path) -> bool:
    """Return whether another open file or mapping of `path` exists; False where the filesystem cannot tell."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Whoever opens the file in this instant breaks the lease: SIGURG is ignored by default, SIGIO kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)  # gives the lease back too
    return False
