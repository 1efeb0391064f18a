"""Acknowledgements between related processes that messages have arrived, whatever channel they took.

Sender and receiver share a memfd, an unnamed file that vanishes with the last process that holds it. The sender chooses
a cell of it and a random number; the receiver of the message writes the number into the cell. Handing in an
acknowledgement twice has no effect, several receivers need no lock, and a late acknowledgement for a sender that is
gone does not confuse the next one.
"""

from __future__ import annotations

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

from shardcache.errors import ConfigError
from shardcache_client.sharing.shared_state import reopened, take

_NUMBER = struct.Struct("<Q")
_DESK_CELLS = 1 << 20  # address space only: the few cells in use at a time are reused

_OFFICES: weakref.WeakValueDictionary[int, Acks] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Ack:
    """The acknowledgement sent along with one message: id of its `Acks`, cell, and the number to write there."""

    office: int
    cell: int
    number: int

    def hand_in(self) -> None:
        """Acknowledge the message to its sender. Raises ConfigError if this process has no way to do so."""
        office = _OFFICES.get(self.office)
        if office is None:
            raise ConfigError(
                "a zero-copy value arrived in a process that does not have its dataset, or no longer has it",
                remedy="keep the dataset while its values are in transit; to other processes, send bytes(value)",
            )
        office.write(self)


@dataclass(slots=True)
class _Desk:
    """The cells reserved for one sending process during its lifetime."""

    pid: int
    fd: int
    fresh: Iterator[int]
    free: list[int] = field(default_factory=list)


class Acks:
    """Acknowledgements shared with forked and spawned children. A copy pickled for any other purpose is a new set."""

    def __init__(self) -> None:
        self._own(os.memfd_create("shardcache-receipts"), randbits(64), os.getpid())

    def __repr__(self) -> str:
        return f"Acks({self._name:016x}, inherited={self.inherited})"

    def _own(self, fd: int, name: int, maker_pid: int) -> None:
        self._fd, self._name, self._maker_pid = fd, name, maker_pid
        self._desk: _Desk | None = None
        weakref.finalize(self, os.close, fd)
        _OFFICES[name] = self

    def receive_here(self) -> None:
        """Make this process the receiver, whichever process created the acknowledgements."""
        self._maker_pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """True if the process that started this one is the receiver."""
        return os.getpid() != self._maker_pid

    def expect(self) -> Ack:
        """Return an acknowledgement to be sent along with a message. Thread-safe."""
        desk = self._desk_here()
        try:
            cell = desk.free.pop()
        except IndexError:
            cell = next(desk.fresh)
        return Ack(self._name, cell, randbits(64))

    def came(self, ack: Ack) -> bool:
        """Return True if an acknowledgement that this process expects was handed in; do not ask for it again."""
        if os.pread(self._fd, _NUMBER.size, ack.cell * _NUMBER.size) != _NUMBER.pack(ack.number):
            return False
        self._desk_here().free.append(ack.cell)
        return True

    def write(self, ack: Ack) -> None:
        """Record an acknowledgement, in the process that received the message."""
        os.pwrite(self._fd, _NUMBER.pack(ack.number), ack.cell * _NUMBER.size)

    def _desk_here(self) -> _Desk:
        if self._desk is None or self._desk.pid != os.getpid():  # the desk of the process that forked this one
            self._desk = _take_desk(self._fd)
            weakref.finalize(self, os.close, self._desk.fd)
        return self._desk

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return Acks, ()
        return _attach, (DupFd(self._fd), self._name, self._maker_pid)


def _attach(duplicate: Any, name: int, maker_pid: int) -> Acks:
    acks = Acks.__new__(Acks)
    acks._own(duplicate.detach(), name, maker_pid)
    return acks


def _take_desk(shared_fd: int) -> _Desk:
    """Take a free desk; its lock is released when this process ends, however it ends."""
    fd = reopened(shared_fd)
    number = next(number for number in count() if take(fd, number))
    return _Desk(os.getpid(), fd, count(number * _DESK_CELLS))
