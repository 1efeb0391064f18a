"""Acknowledgements that messages have arrived, between a process and those that it has started.

The sender of a message picks a cell (8 bytes of a shared file in memory) and a token (a random
number), and sends both along with the message, over any channel. The receiver acknowledges the
message by writing the token into the cell. `Handover` uses this to learn that the receiver has
mapped a file, which the sender may then release.
"""

import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from secrets import randbits
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache_client.sharing.file_locks import reopen, try_lock

_TOKEN = struct.Struct("<Q")
# Number of cells reserved for a process. This is more than a process ever needs, as cells are
# reused. The reserve costs no memory: only cells that are written to take space in the file.
_CELLS_PER_PROCESS = 1 << 20

# All `Acks` of this process, by id. A received `Ack` finds its file here.
_ALL_ACKS: "weakref.WeakValueDictionary[int, Acks]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Ack:
    """The acknowledgement sent along with one message.

    Attributes:
        acks_id: id of the sender's `Acks`.
        cell: number of the cell to write to.
        token: number to write into the cell.
    """

    acks_id: int
    cell: int
    token: int

    def hand_in(self) -> None:
        """Acknowledge the message to its sender.

        Raises ConfigError if this process does not have the sender's `Acks`.
        """
        acks = _ALL_ACKS.get(self.acks_id)
        if acks is None:
            raise ConfigError(
                "a zero-copy value arrived in a process that does not have its dataset, or no "
                "longer has it",
                remedy="keep the dataset while its values are in transit; to other processes, "
                "send bytes(value)",
            )
        os.pwrite(acks.fd, _TOKEN.pack(self.token), self.cell * _TOKEN.size)


@dataclass(slots=True)
class _Cells:
    """The cells reserved for one sending process during its lifetime.

    Attributes:
        pid: id of the process.
        fresh: an endless iterator of the numbers of cells that were never used.
        free: numbers of the cells that may be reused, as their acknowledgements have arrived.
    """

    pid: int
    fresh: Iterator[int]
    free: list[int] = field(default_factory=list)


class Acks:
    """The file of cells that related processes share, and the cells of this process in it.

    The file is a memfd, an unnamed file that vanishes with the last process that holds it. Handing
    in an acknowledgement twice has no effect, and several receivers need no lock. As tokens are
    random, a late acknowledgement for a sender that is gone does not count for the next process
    that uses the cell.

    Forked and spawned children share the file. A copy pickled for any other purpose has a new file.
    """

    def __init__(self) -> None:
        fd = os.memfd_create("shardcache-receipts")
        self._initialise(fd, acks_id=randbits(64), receiver_pid=os.getpid())

    def __repr__(self) -> str:
        return f"Acks({self._id:016x}, is_child_of_receiver={self.is_child_of_receiver})"

    def _initialise(self, fd: int, acks_id: int, receiver_pid: int) -> None:
        """Initialise a new or unpickled object.

        Args:
            fd: descriptor of the memfd, which this object closes.
            acks_id: a number that identifies the memfd in all related processes.
            receiver_pid: id of the process that receives messages.
        """
        self.fd = fd
        self._id = acks_id
        self._receiver_pid = receiver_pid
        self._cells: _Cells | None = None
        weakref.finalize(self, os.close, fd)
        _ALL_ACKS[acks_id] = self

    def receive_here(self) -> None:
        """Make this process the receiver, even if another process has created this object."""
        self._receiver_pid = os.getpid()

    @property
    def is_child_of_receiver(self) -> bool:
        """True if the receiver is a process that started this one, directly or not."""
        return os.getpid() != self._receiver_pid

    def expect(self) -> Ack:
        """Return an acknowledgement to be sent along with a message. Thread-safe."""
        cells = self._own_cells()
        try:
            cell = cells.free.pop()
        except IndexError:
            cell = next(cells.fresh)
        return Ack(self._id, cell, token=randbits(64))

    def collect(self, ack: Ack) -> bool:
        """Free the cell of an acknowledgement that was handed in; return False if it was not.

        Must not be called again after True, as the cell may then be in use for another message.
        """
        written = os.pread(self.fd, _TOKEN.size, ack.cell * _TOKEN.size)
        if written != _TOKEN.pack(ack.token):
            return False
        self._own_cells().free.append(ack.cell)
        return True

    def _own_cells(self) -> _Cells:
        """Return the cells of this process. A forked process does not use its parent's cells."""
        if self._cells is None or self._cells.pid != os.getpid():
            self._cells = self._reserve_cells()
        return self._cells

    def _reserve_cells(self) -> _Cells:
        """Return cells that no other living process uses."""
        # The kernel releases the lock on this descriptor when the process ends, however it ends.
        fd = reopen(self.fd)
        weakref.finalize(self, os.close, fd)
        # The lock on byte n of the file reserves the nth range of cells.
        range_number = 0
        while not try_lock(fd, range_number):
            range_number += 1
        return _Cells(os.getpid(), fresh=count(range_number * _CELLS_PER_PROCESS))

    def __reduce__(self) -> tuple[Any, ...]:
        # Unless a child is being spawned, the pickle may go anywhere, and the copy has a new file.
        if get_spawning_popen() is None:
            return Acks, ()
        return object.__new__, (Acks,), (DupFd(self.fd), self._id, self._receiver_pid)

    def __setstate__(self, state: tuple[Any, int, int]) -> None:
        duplicate, acks_id, receiver_pid = state
        self._initialise(duplicate.detach(), acks_id, receiver_pid)
