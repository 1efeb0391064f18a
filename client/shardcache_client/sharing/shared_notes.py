"""Notes shared by a trainer process and the workers of its DataLoaders: a JSON document in shared memory."""

import errno
import fcntl
import json
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

from shardcache.errors import ConfigError

Notes = dict[str, Any]

_EDITING, _BEGINNING = range(2)  # bytes of the file that processes lock
_SLOT_BYTES = 1 << 30  # address space only
_SIZE = struct.Struct("<Q")
_FLOCK = struct.Struct("hhqqi4x")  # flock of fcntl(2): type, whence, start, length, and a pid that must be 0


class SharedNotes:
    """A dict of JSON values, shared by the process that created it and the DataLoader workers that it starts.

    Any other process that receives it by fork or spawn is a trainer in its own right: it has notes of its own, which
    begin as they were when the process was started. A copy pickled for any other purpose begins with the current notes.

    The notes live in a memfd, an unnamed file that vanishes with the last process that holds it, however that process
    ends. Threads and processes may read and edit at any time, and may be killed while doing so.
    """

    def __init__(self, notes: Notes | None = None, in_worker: Callable[[], bool] = bool) -> None:
        self._in_worker = in_worker  # returns True in a DataLoader worker (`bool()` is False); pickled with the notes
        self._fds: dict[int, int] = {}  # by pid of a trainer; the last is this process's, or that of its trainer
        self._hold(_filled(notes or {}), os.getpid(), {})

    def __repr__(self) -> str:
        return f"SharedNotes({self.read()!r})"

    def _hold(self, fd: int, trainer_pid: int, at_start: Notes) -> None:
        self._at_start = at_start
        if self._fds.setdefault(trainer_pid, fd) == fd:
            weakref.finalize(self, os.close, fd)
            _ALL.add(self)
        else:
            os.close(fd)  # another thread was first

    def _here(self) -> int:
        """Return the descriptor of this process's notes."""
        trainer_pid, fd = list(self._fds.items())[-1]
        if trainer_pid == os.getpid() or self._in_worker():
            return fd
        self._hold(_filled(self._at_start), os.getpid(), self._at_start)
        return self._fds[os.getpid()]

    def read(self) -> Notes:
        """Return the current notes."""
        fd = self._here()
        with _held(fd, _EDITING):
            return _read(fd)

    @contextmanager
    def edit(self) -> Iterator[Notes]:
        """Lend the notes for changes, exclusively."""
        fd = self._here()
        with _held(fd, _EDITING):
            notes = _read(fd)
            yield notes
            _write(fd, notes)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Admit one thread or process at a time, for any length of time; others may still read and edit."""
        with _held(self._here(), _BEGINNING):
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return SharedNotes, (self.read(), self._in_worker)
        notes = self.read()
        trainer_pid, fd = list(self._fds.items())[-1]
        return _attach, (DupFd(fd), trainer_pid, notes, self._in_worker)


def _attach(duplicate: Any, trainer_pid: int, at_start: Notes, in_worker: Callable[[], bool]) -> SharedNotes:
    notes = SharedNotes.__new__(SharedNotes)
    notes._in_worker, notes._fds = in_worker, {}
    notes._hold(duplicate.detach(), trainer_pid, at_start)
    return notes


def _prepare_fork() -> None:
    """Keep the current notes for a child that is about to be forked."""
    for notes in list(_ALL):
        notes._at_start = notes.read()


_ALL: weakref.WeakSet[SharedNotes] = weakref.WeakSet()
os.register_at_fork(before=_prepare_fork)  # in the parent, so that no later edit reaches a forked trainer


# The first byte of the file is the number of the slot that counts. A process killed while it writes the other one has
# changed nothing.


def _filled(notes: Notes) -> int:
    fd = os.memfd_create("shardcache-notes")
    _write(fd, notes)
    return fd


def _write(fd: int, notes: Notes) -> None:
    document = json.dumps(notes).encode()
    slot = 1 - _slot(fd)
    data, at = _SIZE.pack(len(document)) + document, (1 + slot) * _SLOT_BYTES
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
    os.pwrite(fd, bytes([slot]), 0)


def _read(fd: int) -> Notes:
    at = (1 + _slot(fd)) * _SLOT_BYTES
    (size_bytes,) = _SIZE.unpack(os.pread(fd, _SIZE.size, at))
    notes: Notes = json.loads(os.pread(fd, size_bytes, at + _SIZE.size))
    return notes


def _slot(fd: int) -> int:
    return (os.pread(fd, 1, 0) or b"\0")[0]


# Locks on single bytes of a file belong to open file descriptions (F_OFD_SETLK): locks of processes do not exclude
# threads of one process, and are dropped when any descriptor of the file is closed. The kernel releases them when their
# process ends, however it ends.


def reopened(fd: int) -> int:
    """Return a descriptor with its own open file description, as forked processes share that of the original."""
    # /proc/self is this process in every PID namespace, unlike /proc/PID; elsewhere it does not exist.
    try:
        own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as exn:
        raise _no_proc() from exn
    if os.path.sameopenfile(own_fd, fd):
        return own_fd
    os.close(own_fd)
    raise _no_proc()


def _no_proc() -> ConfigError:
    return ConfigError(
        "/proc/self/fd does not show this process's files, which a loader shares with its workers",
        remedy="mount -t proc proc /proc; containers have one by default",
    )


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
def _held(fd: int, byte: int) -> Iterator[None]:
    """Hold the lock on a byte, which excludes other processes and other threads of this one."""
    own = reopened(fd)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        yield
    finally:
        # Unlock explicitly: a child forked by another thread in the meantime shares the open file description.
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
        os.close(own)
