"""A counter of epochs, shared by a trainer and the DataLoader workers that it starts.

The trainer is the process that runs the training loop. Workers of a plain DataLoader iterate over
the dataset without the trainer, so trainer and workers agree by this counter on the epoch that an
iteration reads. A pass is one such iteration, by all workers of a DataLoader. A state is a position
in an epoch, saved in a checkpoint; the trainer loads states to resume. The counter lives in a small
file in memory, with two slots of which one holds the present count.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, ClassVar

from shardcache.errors import ConfigError
from shardcache_client.sharing.file_locks import locked

# Numbers of the bytes in the file that processes lock; the locks do not touch the content.
_COUNTING = 0  # locked while the count is read or changed
_BEGINNING = 1  # locked while an iteration begins

# Offsets in the file. The first byte of the file is the number of the slot that has the count. A
# changed count is written to the other slot before that byte changes, so a process that is killed
# in between has changed nothing.
_SLOTS_AT = (1 << 12, 1 << 13)
_LOADED_AT = 1 << 14  # offset of the states that were loaded last
_SLOT_BYTES = 1 << 12

_MAX_WORKERS = 1024
_BITS_BYTES = _MAX_WORKERS // 8  # size of a set of workers, with a bit for each
# Maximum number of passes that are kept, including passes of abandoned loaders: as many as fit into
# a slot.
_MAX_KEPT = 12


@dataclass(slots=True)
class Pass:
    """One iteration of a plain DataLoader over the dataset, by all its workers.

    Attributes:
        loader: a number that identifies the DataLoader to all of its workers.
        nth: number of the iteration, counted by each worker from 1.
        epoch: the epoch that the pass reads.
        workers: number of workers.
        pid: process id of the worker that began first.
        is_resuming: True if the pass reads from the state that was loaded last.
        joined: bit n is set once worker n has begun.
        read: bit n is set once worker n has read its part to the end.
    """

    loader: int
    nth: int
    epoch: int
    workers: int
    pid: int
    is_resuming: bool = False
    joined: int = 0
    read: int = 0

    FORM: ClassVar[struct.Struct] = struct.Struct(f"<qqqqq?{_BITS_BYTES}s{_BITS_BYTES}s")

    def pack(self) -> bytes:
        """Return the pass as bytes of a fixed size."""
        return self.FORM.pack(
            self.loader,
            self.nth,
            self.epoch,
            self.workers,
            self.pid,
            self.is_resuming,
            self.joined.to_bytes(_BITS_BYTES, "little"),
            self.read.to_bytes(_BITS_BYTES, "little"),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Pass:
        """Return the pass that `pack` turned into bytes."""
        *numbers, joined, read = cls.FORM.unpack(data)
        unpacked = cls(*numbers)
        unpacked.joined = int.from_bytes(joined, "little")
        unpacked.read = int.from_bytes(read, "little")
        return unpacked

    def has_joined(self, worker: int) -> bool:
        """Return True if a worker has begun."""
        return bool(self.joined & (1 << worker))

    def note_joined(self, worker: int) -> None:
        """Record that a worker has begun."""
        self.joined |= 1 << worker

    def note_read(self, worker: int) -> None:
        """Record that a worker has read its part to the end."""
        self.read |= 1 << worker

    @property
    def is_read(self) -> bool:
        """True if all workers have read their parts to the end."""
        return self.read.bit_count() == self.workers


@dataclass(slots=True)
class Count:
    """Counts shared by a trainer and its workers.

    Attributes:
        next: the epoch that an iteration reads if the user has set no epoch.
        chosen: the epoch that the user has set, which every iteration reads; -1 if none is set.
        loads: number of times that states were loaded.
        is_resumed: True once an iteration reads from the state that was loaded last.
        workers: number of workers of the last iteration; 0 for an iteration without workers.
        is_uncounted_logged: True once the log has explained that samples are not counted.
        passes: passes of plain DataLoaders, in the order in which they began.
    """

    next: int = 0
    chosen: int = -1
    loads: int = 0
    is_resumed: bool = False
    workers: int = 0
    is_uncounted_logged: bool = False
    passes: list[Pass] = field(default_factory=list)

    FORM: ClassVar[struct.Struct] = struct.Struct("<qqq?q?B")

    def pack(self) -> bytes:
        """Return the count as bytes that fit into a slot, with the latest passes only."""
        kept = self.passes[-_MAX_KEPT:]
        head = self.FORM.pack(
            self.next,
            self.chosen,
            self.loads,
            self.is_resumed,
            self.workers,
            self.is_uncounted_logged,
            len(kept),
        )
        return head + b"".join(kept_pass.pack() for kept_pass in kept)

    @classmethod
    def unpack(cls, data: bytes) -> Count:
        """Return the count that `pack` turned into bytes."""
        *numbers, kept_passes = cls.FORM.unpack_from(data)
        count = cls(*numbers)
        for number in range(kept_passes):
            start = cls.FORM.size + number * Pass.FORM.size
            count.passes.append(Pass.unpack(data[start : start + Pass.FORM.size]))
        return count

    def pass_of(self, loader: int, nth: int) -> Pass:
        """Return the pass of a loader's workers with the number `nth`.

        It is the latest such pass: an abandoned loader may have had the same number as this loader.
        """
        for each in reversed(self.passes):
            if (each.loader, each.nth) == (loader, nth):
                return each
        # The pass is no longer kept, as many passes have begun since. Its place is taken by a pass
        # that nobody keeps, and that counts as read when any of the workers has read its part.
        return Pass(loader, nth, epoch=0, workers=1, pid=0)

    def pass_to_join(self, loader: int, nth: int, worker: int) -> Pass | None:
        """Return the pass that other workers of a loader have begun and this one has not joined."""
        for each in reversed(self.passes):
            if (each.loader, each.nth) == (loader, nth) and not each.has_joined(worker):
                return each
        return None


def _never_in_worker() -> bool:
    """Stand in for `in_worker` where there are no DataLoader workers."""
    return False


# All counters of this process.
_COUNTERS: weakref.WeakSet[EpochCounter] = weakref.WeakSet()


class EpochCounter:
    """A count that a process shares with the DataLoader workers that it starts.

    Any other process that receives the counter by fork or spawn is a trainer in its own right: it
    has a separate count, which begins with the value at the time when the process was started. A
    copy pickled for any other purpose begins with the current count.

    The count lives in a memfd, an unnamed file that vanishes with the last process that holds it,
    however that process ends. Threads and processes may read and change the count at any time, and
    may be killed while doing so.

    Args:
        count: the count to begin with; None for a new count.
        in_worker: returns True in a DataLoader worker; it is pickled with the counter.
    """

    def __init__(
        self, count: Count | None = None, in_worker: Callable[[], bool] = _never_in_worker
    ) -> None:
        self._in_worker = in_worker
        # Descriptors of the files, by the pid of each file's trainer. The last file belongs to this
        # process or to its trainer. Earlier files belong to trainers that this process was forked
        # from.
        self._fds: dict[int, int] = {}
        first = count or Count()
        self._keep(_new_file(first), os.getpid(), first)

    def __repr__(self) -> str:
        return f"EpochCounter({self.read()!r})"

    def _keep(self, fd: int, trainer_pid: int, at_start: Count) -> None:
        """Keep the file with the count of a trainer and its workers, as long as this object lives.

        Args:
            fd: descriptor of the file.
            trainer_pid: process id of the trainer.
            at_start: the count with which this process begins if it turns out to be a trainer
                itself.
        """
        self._at_start = at_start
        # `setdefault` is atomic, so of two threads that make a file for this process, one wins.
        if self._fds.setdefault(trainer_pid, fd) == fd:
            weakref.finalize(self, os.close, fd)
            _COUNTERS.add(self)
        else:
            os.close(fd)  # another thread was first, and its file is used

    def _latest_file(self) -> tuple[int, int]:
        """Return the pid of the trainer and the descriptor of the last file."""
        return list(self._fds.items())[-1]

    def _own_fd(self) -> int:
        """Return the descriptor of the file with this process's count.

        A worker shares its trainer's file. Any other process makes its own file when it first needs
        the count.
        """
        trainer_pid, fd = self._latest_file()
        if trainer_pid == os.getpid() or self._in_worker():
            return fd
        self._keep(_new_file(self._at_start), os.getpid(), self._at_start)
        return self._fds[os.getpid()]

    def read(self) -> Count:
        """Return the present count."""
        fd = self._own_fd()
        with locked(fd, _COUNTING):
            return _read(fd)

    @contextmanager
    def change(self) -> Iterator[Count]:
        """Lend the count for changes, exclusively."""
        fd = self._own_fd()
        with locked(fd, _COUNTING):
            count = _read(fd)
            yield count
            _write(fd, count)

    def hold_loaded(self, states: bytes) -> None:
        """Keep the states that were loaded last, for workers that are running already.

        Workers look for them once the caller has raised `Count.loads`.
        """
        fd = self._own_fd()
        with locked(fd, _COUNTING):
            os.ftruncate(fd, _LOADED_AT)  # the last states may be longer than these
            os.pwrite(fd, states, _LOADED_AT)

    def loaded(self) -> bytes:
        """Return the states that were loaded last; b"" if none was since this process began."""
        fd = self._own_fd()
        with locked(fd, _COUNTING):
            size_bytes = os.fstat(fd).st_size - _LOADED_AT
            return os.pread(fd, max(0, size_bytes), _LOADED_AT)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Admit one thread or process at a time to a block; others can still use the count."""
        with locked(self._own_fd(), _BEGINNING):
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        # 1. A copy, such as a copy in a checkpoint, gets a separate counter.
        if get_spawning_popen() is None:
            return EpochCounter, (self.read(), self._in_worker)

        # 2. A process that is being spawned gets the same file. If that process is not a worker, it
        # makes its own file when it first needs the count; see `_own_fd`.
        count = self.read()
        trainer_pid, fd = self._latest_file()
        return object.__new__, (EpochCounter,), (DupFd(fd), trainer_pid, count, self._in_worker)

    def __setstate__(self, state: tuple[Any, int, Count, Callable[[], bool]]) -> None:
        duplicate, trainer_pid, at_start, in_worker = state
        self._in_worker = in_worker
        self._fds = {}
        self._keep(duplicate.detach(), trainer_pid, at_start)

    def prepare_fork(self) -> None:
        """Keep the present count for a child that is about to be forked."""
        self._at_start = self.read()


def _prepare_fork() -> None:
    """Have all counters keep their present counts for a child that is about to be forked."""
    for counter in list(_COUNTERS):
        counter.prepare_fork()


# The counts are kept before the fork, so that a forked trainer does not see later changes.
os.register_at_fork(before=_prepare_fork)


def _new_file(count: Count) -> int:
    """Return the descriptor of a new file with a count. Raises ConfigError."""
    fd = os.memfd_create("shardcache-epochs")
    try:
        _write(fd, count)
    except OSError as exn:
        os.close(fd)
        raise ConfigError(
            "this process may not write the count of epochs that the dataset's "
            f"processes share ({exn.strerror})",
            remedy="before the job starts: ulimit -S -f unlimited; the limit of file sizes "
            "counts for shared memory as well",
        ) from exn
    return fd


def _write(fd: int, count: Count) -> None:
    """Write a count into the slot that is not in use, then change to that slot."""
    slot = 1 - _current_slot(fd)
    os.pwrite(fd, count.pack(), _SLOTS_AT[slot])
    os.pwrite(fd, bytes([slot]), 0)  # the first byte of the file


def _read(fd: int) -> Count:
    """Return the count in the slot that is in use."""
    return Count.unpack(os.pread(fd, _SLOT_BYTES, _SLOTS_AT[_current_slot(fd)]))


def _current_slot(fd: int) -> int:
    """Return the number of the slot that is in use; 0 for an empty file."""
    first_byte = os.pread(fd, 1, 0)
    return first_byte[0] if first_byte else 0
