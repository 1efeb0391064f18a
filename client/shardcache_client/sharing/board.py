"""A board on which the processes of one dataset leave notes for each other: a JSON document in shared memory."""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

Notes = dict[str, Any]


class Board:
    """A dict of JSON values, shared with forked and spawned children, also with those that run already.

    It lives in a memfd: a file without a name, gone with the last process that holds it, however that ends. A copy
    that is pickled for any other purpose than starting a process takes the notes along and is a board of its own.
    """

    def __init__(self, notes: Notes | None = None) -> None:
        self._own(os.memfd_create("shardcache-board"))
        with self.edit() as present:
            present |= notes or {}

    def __repr__(self) -> str:
        return f"Board({self.read()!r})"

    def _own(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def read(self) -> Notes:
        """Return the notes as they are now."""
        with self._locked(fcntl.LOCK_SH):
            return self._load()

    @contextmanager
    def edit(self) -> Iterator[Notes]:
        """Lend the notes to be changed, to nobody else at the same time."""
        with self._locked(fcntl.LOCK_EX):
            notes = self._load()
            yield notes
            data = json.dumps(notes).encode()
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))

    def _load(self) -> Notes:
        size_bytes = os.fstat(self._fd).st_size
        notes: Notes = json.loads(os.pread(self._fd, size_bytes, 0)) if size_bytes else {}
        return notes

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        # A lock of this process's, not of the open file, which forked children share.
        fcntl.lockf(self._fd, kind)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return Board, (self.read(),)
        return _attach, (DupFd(self._fd),)


def _attach(duplicate: Any) -> Board:
    board = Board.__new__(Board)
    board._own(duplicate.detach())
    return board
