"""Locks on single bytes of an unnamed file shared by processes, such as a memfd.

They belong to open file descriptions (F_OFD_SETLK): locks of processes do not exclude threads of one process, and are
dropped when any descriptor of the file is closed. The kernel releases them when their process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_FLOCK = struct.Struct("hhqqi4x")  # flock of fcntl(2): type, whence, start, length, and a pid that must be 0


def reopened(fd: int) -> int:
    """Return a descriptor with its own open file description, as forked processes share that of the original."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def take(fd: int, byte: int) -> bool:
    """Lock a byte unless another open file description holds it; return True on success."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as exn:
        if exn.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


@contextmanager
def held(fd: int, byte: int) -> Iterator[None]:
    """Hold the lock on a byte, which excludes other processes and other threads of this one."""
    own = reopened(fd)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        yield
    finally:
        # Unlock explicitly: a child forked by another thread in the meantime shares the open file description.
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
        os.close(own)
