"""Locks on single bytes of files, which exclude processes and threads.

A lock ends with its process, however the process ends. The locks belong to open file descriptions
(F_OFD_SETLK). The usual locks, which belong to processes, would not exclude threads of the same
process, and would be dropped when any descriptor of the file is closed.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from shardcache.shared.exceptions import ConfigError

# flock of fcntl(2): type, whence, start, length, and a pid that must be 0.
_FLOCK = struct.Struct("hhqqi4x")


def reopen(fd: int) -> int:
    """Return a descriptor of the same file that has a new open file description.

    The original's open file description is shared with forked processes, so a lock on it would not
    exclude them.
    """
    # The path uses /proc/self, not the process id. If /proc belongs to another PID namespace, then
    # /proc/self is still this process, or does not exist; /proc/PID may be another process.
    try:
        own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as exn:
        raise _no_proc() from exn
    # Without this check, a lock on another file would silently have no effect.
    if os.path.sameopenfile(own_fd, fd):
        return own_fd
    os.close(own_fd)
    raise _no_proc()


def _no_proc() -> ConfigError:
    """Return the error for a process without the /proc of its own PID namespace."""
    return ConfigError(
        "/proc/self/fd does not show this process's files, which a loader shares with its workers",
        remedy="mount -t proc proc /proc; containers have one by default",
    )


def try_lock(fd: int, byte: int) -> bool:
    """Lock a byte and return True; return False if another open file description has locked it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock_of(fcntl.F_WRLCK, byte))
    except OSError as exn:
        if exn.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


@contextmanager
def locked(fd: int, byte: int) -> Iterator[None]:
    """Wait for the lock on a byte and hold it, to exclude other processes and other threads."""
    own_fd = reopen(fd)
    try:
        fcntl.fcntl(own_fd, fcntl.F_OFD_SETLKW, _flock_of(fcntl.F_WRLCK, byte))
        yield
    finally:
        # Closing the descriptor is not enough to unlock: a child that another thread has forked in
        # the meantime shares the open file description, and would keep the lock.
        fcntl.fcntl(own_fd, fcntl.F_OFD_SETLK, _flock_of(fcntl.F_UNLCK, byte))
        os.close(own_fd)


def _flock_of(kind: int, byte: int) -> bytes:
    """Return the argument of fcntl that locks or unlocks one byte."""
    # The length is 1 byte. The pid must be 0 for locks of open file descriptions.
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
