"""Files that somebody else has to open, held back."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def opening_blocked(path: Path) -> Iterator[None]:
    """Have everybody who opens a file wait until the end of the block, by a lease on it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(fd)
