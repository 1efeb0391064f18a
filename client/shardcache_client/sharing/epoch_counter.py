"""A counter of epochs, shared by a trainer and the DataLoader workers that it starts.

The trainer is the process that runs the training loop. Workers of a plain DataLoader iterate over
the dataset without the trainer. By this counter, trainer and workers agree on the epoch that an
iteration reads.

A pass is one iteration of all workers of a DataLoader. A state is a position in an epoch, saved in
a checkpoint, which the trainer loads to resume.

The counter lives in a small file in memory, with two slots, one of which has the present count.
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

from shardcache.shared.exceptions import ConfigError
from shardcache_client.sharing.file_locks import locked

# Bytes of the file that processes lock. The locks have nothing to do with the content of the bytes.
_COUNT_LOCK = 0  # locked while the count is read or changed
_TURN_LOCK = 1  # locked while an iteration begins

# The first byte of the file is the number of the slot that has the count. A changed count is
# written to the other slot before that byte changes, so a process that is killed in between has
# changed nothing.
_SLOT_OFFSETS = (1 << 12, 1 << 13)
_SLOT_BYTES = 1 << 12
_STATES_OFFSET = 1 << 14  # offset in the file of the states that were loaded last

_MAX_WORKERS = 1024
_SET_BYTES = _MAX_WORKERS // 8  # size of a set of workers, with a bit for each
# Maximum number of passes that are kept, including passes of abandoned loaders. They have to fit
# into a slot.
_MAX_KEPT_PASSES = 12


@dataclass(slots=True)
class Pass:
    """One iteration of a plain DataLoader over the dataset, by all its workers.

    Attributes:
        loader: a number that identifies the DataLoader to all of its workers.
        nth: number of the iteration, counted by each worker from 1.
        epoch: the epoch that the pass reads.
        workers: number of workers.
        pid: process id of the worker that began first.
        is_resuming: True if the pass resumes from the states that were loaded last.
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

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(f"<qqqqq?{_SET_BYTES}s{_SET_BYTES}s")

    def pack(self) -> bytes:
        """Return the pass as bytes of a fixed size."""
        return self.LAYOUT.pack(
            self.loader,
            self.nth,
            self.epoch,
            self.workers,
            self.pid,
            self.is_resuming,
            self.joined.to_bytes(_SET_BYTES, "little"),
            self.read.to_bytes(_SET_BYTES, "little"),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Pass:
        """Return the pass that `pack` turned into bytes."""
        *numbers, joined, read = cls.LAYOUT.unpack(data)
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
        is_resumed: True once an iteration has resumed from the states that were loaded last.
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

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<qqq?q?B")

    def pack(self) -> bytes:
        """Return the count as bytes that fit into a slot, with the latest passes only."""
        kept_passes = self.passes[-_MAX_KEPT_PASSES:]
        head = self.LAYOUT.pack(
            self.next,
            self.chosen,
            self.loads,
            self.is_resumed,
            self.workers,
            self.is_uncounted_logged,
            len(kept_passes),
        )
        return head + b"".join(kept_pass.pack() for kept_pass in kept_passes)

    @classmethod
    def unpack(cls, data: bytes) -> Count:
        """Return the count that `pack` turned into bytes."""
        *numbers, pass_count = cls.LAYOUT.unpack_from(data)
        count = cls(*numbers)
        for number in range(pass_count):
            start = cls.LAYOUT.size + number * Pass.LAYOUT.size
            count.passes.append(Pass.unpack(data[start : start + Pass.LAYOUT.size]))
        return count

    def pass_of(self, loader: int, nth: int) -> Pass:
        """Return the pass of a loader's workers with the number `nth`.

        If several loaders had this number, it is the latest loader's pass.
        """
        for each in reversed(self.passes):
            if (each.loader, each.nth) == (loader, nth):
                return each
        # The pass is no longer kept, as many passes have begun since. This substitute is not kept
        # either. It counts as read as soon as any of the workers has read its part.
        return Pass(loader, nth, epoch=0, workers=1, pid=0)

    def pass_to_join(self, loader: int, nth: int, worker: int) -> Pass | None:
        """Return the pass that other workers of a loader have begun, for this worker to join.

        None if there is no pass that it has not joined, so that it has to begin one.
        """
        for each in reversed(self.passes):
            if (each.loader, each.nth) == (loader, nth) and not each.has_joined(worker):
                return each
        return None


def _never_in_worker() -> bool:
    """Return False: this is `in_worker` in a program that has no DataLoader workers."""
    return False


# All counters of this process.
_COUNTERS: weakref.WeakSet[EpochCounter] = weakref.WeakSet()


class EpochCounter:
    """A count that a process shares with the DataLoader workers that it starts.

    Any other process that receives the counter by fork or spawn is a trainer itself. It has a count
    of its own, which begins with the value at the time when the process was started. A copy pickled
    for any other purpose begins with the value at the time of pickling.

    The count lives in a memfd, an unnamed file that vanishes with the last process that holds it,
    however that process ends. Threads and processes may read and change the count at any time, and
    may be killed while they do.

    Args:
        count: the count to begin with; None for a new count.
        in_worker: returns True in a DataLoader worker; it is pickled with the counter.
    """

    def __init__(
        self, count: Count | None = None, in_worker: Callable[[], bool] = _never_in_worker
    ) -> None:
        self._in_worker = in_worker
        # Descriptors of the files, by the pid of each file's trainer. The last file belongs to this
        # process or to its trainer. Earlier files belong to processes from which it was forked.
        self._fds: dict[int, int] = {}
        first_count = count or Count()
        self._keep_file(_new_file(first_count), os.getpid(), first_count)

    def __repr__(self) -> str:
        return f"EpochCounter({self.read()!r})"

    def _keep_file(self, fd: int, trainer_pid: int, first_count: Count) -> None:
        """Keep the file with the count of a trainer and its workers, as long as this object lives.

        Args:
            fd: descriptor of the file.
            trainer_pid: process id of the trainer.
            first_count: the count with which this process begins if it is a trainer itself.
        """
        self._first_count = first_count
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
        self._keep_file(_new_file(self._first_count), os.getpid(), self._first_count)
        return self._fds[os.getpid()]

    def read(self) -> Count:
        """Return the present count."""
        fd = self._own_fd()
        with locked(fd, _COUNT_LOCK):
            return _read(fd)

    @contextmanager
    def change(self) -> Iterator[Count]:
        """Give the count for changes, which are written at the end of the block.

        Until then, no other thread or process can read or change the count.
        """
        fd = self._own_fd()
        with locked(fd, _COUNT_LOCK):
            count = _read(fd)
            yield count
            _write(fd, count)

    def store_states(self, states: bytes) -> None:
        """Store the states that the trainer has loaded, for workers that are running already.

        Workers read them once the caller has raised `Count.loads`.
        """
        fd = self._own_fd()
        with locked(fd, _COUNT_LOCK):
            os.ftruncate(fd, _STATES_OFFSET)  # removes earlier states, which may be longer
            os.pwrite(fd, states, _STATES_OFFSET)

    def stored_states(self) -> bytes:
        """Return the states that were stored last; b"" if the trainer has stored none."""
        fd = self._own_fd()
        with locked(fd, _COUNT_LOCK):
            size_bytes = os.fstat(fd).st_size - _STATES_OFFSET
            return os.pread(fd, max(0, size_bytes), _STATES_OFFSET)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Admit one thread or process at a time to a block, in which it begins an iteration.

        The others can still read and change the count.
        """
        with locked(self._own_fd(), _TURN_LOCK):
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        # 1. A copy, such as a copy in a checkpoint, gets a separate counter.
        if get_spawning_popen() is None:
            return EpochCounter, (self.read(), self._in_worker)

        # 2. A process that is being spawned gets the same file, and makes one of its own if it is
        # not a worker; see `_own_fd`.
        count = self.read()
        trainer_pid, fd = self._latest_file()
        return object.__new__, (EpochCounter,), (DupFd(fd), trainer_pid, count, self._in_worker)

    def __setstate__(self, state: tuple[Any, int, Count, Callable[[], bool]]) -> None:
        duplicate, trainer_pid, first_count, in_worker = state
        self._in_worker = in_worker
        self._fds = {}
        self._keep_file(duplicate.detach(), trainer_pid, first_count)

    def prepare_fork(self) -> None:
        """Note the present count, with which a child that is about to be forked begins."""
        self._first_count = self.read()


def _prepare_fork() -> None:
    """Prepare all counters for a fork."""
    for counter in list(_COUNTERS):
        counter.prepare_fork()


# The counts are noted before the fork, so that a forked trainer does not see later changes.
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
    """Write a count into the slot that is not in use, then make that slot the one in use."""
    slot = 1 - _current_slot(fd)
    os.pwrite(fd, count.pack(), _SLOT_OFFSETS[slot])
    os.pwrite(fd, bytes([slot]), 0)  # the first byte of the file


def _read(fd: int) -> Count:
    """Return the count in the slot that is in use."""
    return Count.unpack(os.pread(fd, _SLOT_BYTES, _SLOT_OFFSETS[_current_slot(fd)]))


def _current_slot(fd: int) -> int:
    """Return the number of the slot that is in use; 0 for an empty file."""
    first_byte = os.pread(fd, 1, 0)
    return first_byte[0] if first_byte else 0
