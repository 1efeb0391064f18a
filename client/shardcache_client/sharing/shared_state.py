"""State shared by a trainer process and the workers of its DataLoaders: a JSON document in shared memory."""

from __future__ import annotations

import json
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any
from zlib import crc32

from shardcache_client.sharing.locks import held

Notes = dict[str, Any]

_EDITING, _BEGINNING = range(2)  # bytes of the file that processes lock

# Two slots, written alternately: a process killed while writing one does not damage the other. The size is address
# space only.
_SLOT_BYTES = 1 << 30
_COUNTS = struct.Struct("<QQ")  # number of the edit, and length of the document after the checksum
_CHECKSUM = struct.Struct("<I")
_HEAD_BYTES = _COUNTS.size + _CHECKSUM.size

_BOARDS: weakref.WeakValueDictionary[int, SharedState] = weakref.WeakValueDictionary()
_detaching = threading.Lock()


def _nowhere() -> bool:
    return False


class SharedState:
    """A dict of JSON values, shared by the process that created it and the DataLoader workers that it starts.

    Any other process that receives it by fork or spawn is a trainer in its own right: at its first use it gets its own
    shared state, with the notes as they were when the process was started. A copy pickled for any other purpose begins
    with the current notes.

    The notes live in a memfd, an unnamed file that vanishes with the last process that holds it, however that process
    ends. Threads and processes may read and edit at any time, and may be killed while doing so.

    Args:
        notes: initial notes.
        in_worker: returns True in a DataLoader worker. Pickled with the shared state.
    """

    def __init__(self, notes: Notes | None = None, in_worker: Callable[[], bool] = _nowhere) -> None:
        self._in_worker = in_worker
        self._make(json.dumps(notes or {}).encode())

    def __repr__(self) -> str:
        return f"SharedState({self.read()!r})"

    def _make(self, document: bytes) -> None:
        fd = os.memfd_create("shardcache-board")
        _write(fd, 1, document)
        self._hold(fd, os.getpid(), document)

    def _hold(self, fd: int, trainer_pid: int, at_start: bytes) -> None:
        self._fd, self._at_start = fd, at_start
        self._close = weakref.finalize(self, os.close, fd)
        self._trainer_pid = trainer_pid  # last: until then, other threads wait in `_here`
        _BOARDS[id(self)] = self

    def _here(self) -> int:
        """Return the descriptor of this process's notes, detached first from a trainer it does not work for."""
        if self._detached():
            return self._fd
        with _detaching:
            if not self._detached():
                self._close()
                self._make(self._at_start)
        return self._fd

    def _detached(self) -> bool:
        return self._trainer_pid == os.getpid() or self._in_worker()

    def read(self) -> Notes:
        """Return the current notes."""
        notes: Notes = json.loads(_newest(self._here())[1])
        return notes

    def read_at_start(self) -> Notes:
        """Return the notes as they were when this process was started."""
        notes: Notes = json.loads(self._at_start)
        return notes

    @contextmanager
    def edit(self) -> Iterator[Notes]:
        """Lend the notes for changes, exclusively."""
        fd = self._here()
        with held(fd, _EDITING):
            number, document = _newest(fd)
            notes: Notes = json.loads(document)
            yield notes
            _write(fd, number + 1, json.dumps(notes).encode())

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Admit one thread or process at a time, for any length of time; others may still read and edit."""
        with held(self._here(), _BEGINNING):
            yield

    def prepare_fork(self) -> None:
        """Keep the current notes for a child that is about to be forked."""
        self._at_start = _newest(self._here())[1]

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return SharedState, (self.read(), self._in_worker)
        self.prepare_fork()
        return _attach, (DupFd(self._fd), self._trainer_pid, self._at_start, self._in_worker)


def _attach(duplicate: Any, trainer_pid: int, at_start: bytes, in_worker: Callable[[], bool]) -> SharedState:
    shared_state = SharedState.__new__(SharedState)
    shared_state._in_worker = in_worker
    shared_state._hold(duplicate.detach(), trainer_pid, at_start)
    return shared_state


def _write(fd: int, number: int, document: bytes) -> None:
    counts = _COUNTS.pack(number, len(document))
    data = counts + _CHECKSUM.pack(crc32(document, crc32(counts))) + document
    at = number % 2 * _SLOT_BYTES
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _newest(fd: int) -> tuple[int, bytes]:
    """Return the number and the document of the last edit. Needs no lock: one slot is always whole, or soon will be."""
    while True:
        if found := max(filter(None, (_read(fd, slot) for slot in range(2))), default=None):
            return found


def _read(fd: int, slot: int) -> tuple[int, bytes] | None:
    at = slot * _SLOT_BYTES
    head = os.pread(fd, _HEAD_BYTES, at)
    if len(head) < _HEAD_BYTES:
        return None
    number, size_bytes = _COUNTS.unpack_from(head)
    document = os.pread(fd, min(size_bytes, _SLOT_BYTES - _HEAD_BYTES), at + _HEAD_BYTES)
    (checksum,) = _CHECKSUM.unpack_from(head, _COUNTS.size)
    return (number, document) if checksum == crc32(document, crc32(head[: _COUNTS.size])) else None


def _prepare_fork() -> None:
    for reference in _BOARDS.valuerefs():
        shared_state = reference()
        if shared_state is not None:
            shared_state.prepare_fork()


def _begin_child() -> None:
    global _detaching
    _detaching = threading.Lock()  # the parent's may have been held by a thread that does not exist in the child


# In the parent, so that no edit made after the fork reaches a forked trainer.
os.register_at_fork(before=_prepare_fork, after_in_child=_begin_child)
