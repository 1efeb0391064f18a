"""Locks on single bytes of a file that has no name and that processes share, such as a memfd.

Locks of open file descriptions (F_OFD_SETLK): those of processes do not keep their threads apart, and go when any
descriptor of the file is closed. The kernel gives them back when their process ends, however it ends.
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
    """Return a descriptor with an open file description of its own; one that came by fork is the relatives', too."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def take(fd: int, byte: int) -> bool:
    """Lock a byte, unless another open file description has it; return whether it did."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as exn:
        if exn.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


@contextmanager
def held(fd: int, byte: int) -> Iterator[None]:
    """Hold a byte: one thread of one process at a time."""
    own = reopened(fd)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        yield
    finally:
        # By name: a child that was forked meanwhile by another thread has the description, too.
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
        os.close(own)
