"""Receipts: how a process learns that its relatives have got what it sent them, whatever way that went.

Sender and receiver share a memfd, a file without a name that is gone with the last process which holds it. The
sender chooses a cell of it and a random number; who gets the message writes the number into the cell. To hand in the
same receipt twice changes nothing, several receivers need no lock, and a late receipt for a sender that is gone means
nothing to the next one.
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
from shardcache_client.sharing.locks import reopened, take

_NUMBER = struct.Struct("<Q")
_DESK_CELLS = 1 << 20  # address space only: the few that are in use at a time are the same ones again and again

_OFFICES: weakref.WeakValueDictionary[int, Receipts] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What goes along with one message: whose receipts, which cell, and the number to write there."""

    office: int
    cell: int
    number: int

    def hand_in(self) -> None:
        """Tell the sender that its message is here. Raises ConfigError where this process has no way to tell."""
        office = _OFFICES.get(self.office)
        if office is None:
            raise ConfigError(
                "a zero-copy value came to a process that never had the dataset it is from, or has it no more",
                remedy="keep the dataset as long as its values are on their way; to other processes send bytes(value)",
            )
        office.write(self)


@dataclass(slots=True)
class _Desk:
    """The cells that are one sending process's own for as long as it lives."""

    pid: int
    fd: int
    fresh: Iterator[int]
    free: list[int] = field(default_factory=list)


class Receipts:
    """Shared with forked and spawned children. A copy that is pickled for any other purpose is a new one."""

    def __init__(self) -> None:
        self._own(os.memfd_create("shardcache-receipts"), randbits(64), os.getpid())

    def __repr__(self) -> str:
        return f"Receipts({self._name:016x}, inherited={self.inherited})"

    def _own(self, fd: int, name: int, maker_pid: int) -> None:
        self._fd, self._name, self._maker_pid = fd, name, maker_pid
        self._desk: _Desk | None = None
        weakref.finalize(self, os.close, fd)
        _OFFICES[name] = self

    def receive_here(self) -> None:
        """Make this process the one that receives, whoever made the receipts: it has no relative to send to."""
        self._maker_pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """Whether another process, the one that started this one, has them, too."""
        return os.getpid() != self._maker_pid

    def expect(self) -> Receipt:
        """Return a receipt to be sent along with a message. Any thread may ask."""
        desk = self._desk_here()
        try:
            cell = desk.free.pop()
        except IndexError:
            cell = next(desk.fresh)
        return Receipt(self._name, cell, randbits(64))

    def came(self, receipt: Receipt) -> bool:
        """Whether a receipt was handed in that this process expects; if so, it is to be asked for no more."""
        if os.pread(self._fd, _NUMBER.size, receipt.cell * _NUMBER.size) != _NUMBER.pack(receipt.number):
            return False
        self._desk_here().free.append(receipt.cell)
        return True

    def write(self, receipt: Receipt) -> None:
        """Write a receipt down, in whichever process got the message."""
        os.pwrite(self._fd, _NUMBER.pack(receipt.number), receipt.cell * _NUMBER.size)

    def _desk_here(self) -> _Desk:
        if self._desk is None or self._desk.pid != os.getpid():  # that of the process which forked this one
            self._desk = _take_desk(self._fd)
            weakref.finalize(self, os.close, self._desk.fd)
        return self._desk

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return Receipts, ()
        return _attach, (DupFd(self._fd), self._name, self._maker_pid)


def _attach(duplicate: Any, name: int, maker_pid: int) -> Receipts:
    receipts = Receipts.__new__(Receipts)
    receipts._own(duplicate.detach(), name, maker_pid)
    return receipts


def _take_desk(shared_fd: int) -> _Desk:
    """Find a desk that nobody sits at; the lock on it is given back when this process ends, however it ends."""
    fd = reopened(shared_fd)
    number = next(number for number in count() if take(fd, number))
    return _Desk(os.getpid(), fd, count(number * _DESK_CELLS))
