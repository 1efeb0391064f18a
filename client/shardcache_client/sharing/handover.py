"""The hand-over of a shard's bytes from a DataLoader worker to its trainer, without a copy.

Between processes, a Buffer is pickled as a reference to a range of a file. The receiver maps the
same file once, and keeps that map as long as any Buffer of it lives. The file must stay cached
until the receiver has mapped it. So the worker keeps its own map until it holds no Buffer of the
shard any more, in any queue, and has an acknowledgement for every message in which one was sent.
The cache does not evict files mapped by any process; keeping the lease for as long saves it the
attempt.
"""

import mmap
import os
import weakref
from collections.abc import Collection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from shardcache.errors import ConfigError
from shardcache.tarindex.tables import Tables
from shardcache_client.samples.mapped_file import map_file, unreadable
from shardcache_client.samples.slicing import SlicedColumn, Slices, as_bytes
from shardcache_client.sharing.acks import Ack, Acks
from shardcache_client.sharing.buffer import MIN_BUFFER_BYTES, Buffer, span_in_whole
from shardcache_client.sharing.value_forms import Form, ValuesBySize, forms_of

# First pickle protocol that handles large bytes well. Protocol 5 would put Buffers outside of the
# pickle, which does not suit pipes.
_BY_VALUE_PROTOCOL = 4

_RECEIVED: weakref.WeakValueDictionary[tuple[str, int], Buffer] = weakref.WeakValueDictionary()
"""Whole shards from which this process has received Buffers, as long as any of these live.

By path and inode.
"""


class Handover:
    """State shared by a process that receives Buffers and the workers that it starts.

    The receiving process is the one that created this object, or that claimed the role.

    Only workers that the receiving process starts send Buffers as references. That process itself,
    and any other that a pickled copy has come to, send them by value: no process is known to be
    able to follow their references.
    """

    def __init__(self, extensions: Collection[str] | None = None) -> None:
        """Begin a handover to this process.

        Args:
            extensions: of the members passed without a copy; None for all.
        """
        self.extensions = extensions
        self.acks = Acks()
        self._lent: set[Loan] = set()  # loans that may not be settled yet

    @classmethod
    def of(cls, zero_copy: bool | str | Collection[str]) -> "Handover":
        """Return the handover that a dataset's `zero_copy` describes. Raises ConfigError."""
        if isinstance(zero_copy, bool):
            return cls()
        extensions = [zero_copy] if isinstance(zero_copy, str) else zero_copy
        if any(extension.startswith(".") for extension in extensions):
            remedy = 'write extensions without a dot: "jpg", not ".jpg"'
            raise ConfigError(f"zero_copy is {zero_copy!r}", remedy=remedy)
        return cls(frozenset(extension.lower() for extension in extensions))

    def __repr__(self) -> str:
        return f"Handover({self.acks!r})"

    def lend(self, mapped: mmap.mmap, path: Path | None, inode: int, url: str) -> "Loan":
        """Return the loan of a file mapped whole.

        It slices the file's bytes, and tracks when it may be unmapped.

        Args:
            path: at which other processes find the file while this one has it mapped; with None,
                they get its bytes by value.
            inode: of the file.
            url: of the shard.
        """
        return Loan(self, mapped, path, inode, url)

    def keep(self, loan: "Loan") -> None:
        """Hold a loan until it is settled: the epoch may end while messages are in transit."""
        self._lent.add(loan)

    def settle(self) -> None:
        """Drop the loans that are settled, to free space for a shard that is waited for."""
        self._lent = {loan for loan in self._lent if not loan.settled()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lent": set()}


class Loan:
    """One mapped shard, and the acknowledgements expected for Buffers that were sent."""

    def __init__(
        self,
        handover: Handover,
        mapped: mmap.mmap,
        path: Path | None,
        inode: int,
        url: str,
    ) -> None:
        self._handover = handover
        self._map = mapped
        # The arguments with which a receiver maps the file: see `_receive`.
        self._file = (os.fspath(path or ""), inode, len(mapped), url)
        self._expected: list[Ack] = []  # one for each message that was sent
        self._whole: weakref.ref[Buffer] | None = None
        self._forms: list[Form] | None = None  # of the values of each extension
        # The process that sends references: this one, if the process that started it is the
        # receiver, and can find the file.
        self._sender_pid: int | None = None
        if handover.acks.inherited and path is not None:
            self._sender_pid = os.getpid()

    def __repr__(self) -> str:
        path, *_ = self._file
        return f"Loan({path!r}, expected={len(self._expected)})"

    def whole(self) -> Buffer:
        """Return the shard's bytes, to slice samples from. Every slice keeps the loan open."""
        whole = self._whole_if_alive()
        if whole is None:
            whole = Buffer.over(self._map)
            whole.shard_source = self
            self._whole = weakref.ref(whole)
            if self.sends_references:
                self._handover.keep(self)
        return whole

    def columns(self, tables: Tables) -> list[SlicedColumn]:
        """Return the column of each extension; values that are copied do not keep the loan open."""
        if self._forms is None:
            self._forms = forms_of(tables, self._handover.extensions)
        if Form.VIEW not in self._forms and Form.BY_SIZE not in self._forms:
            return as_bytes(tables.extensions, self._map)

        whole = self.whole()
        slices: dict[Form, Slices] = {
            Form.BYTES: self._map,
            Form.VIEW: whole,
            Form.BY_SIZE: ValuesBySize(self._map, whole),
        }
        # The third value of a column is its decoder, which the caller adds.
        forms_by_extension = zip(tables.extensions, self._forms, strict=True)
        return [(extension, slices[form], None) for extension, form in forms_by_extension]

    @property
    def sends_references(self) -> bool:
        """True in the process that sends Buffers as references."""
        return os.getpid() == self._sender_pid

    def settled(self) -> bool:
        """Return True if everything sent has arrived.

        To be called once the reader has dropped `whole()` and the last sample.
        """
        # Without references, no other process needs to find the file; Buffers here keep their map.
        if not self.sends_references:
            return True
        # Checked before the acknowledgements, as a Buffer may be sent as long as it lives.
        if self._whole_if_alive() is not None:
            return False
        self._expected = [ack for ack in self._expected if not self._handover.acks.has_arrived(ack)]
        return not self._expected

    def _whole_if_alive(self) -> Buffer | None:
        """Return the Buffer of the whole shard, if it or any slice of it still lives."""
        if self._whole is None:
            return None
        return self._whole()

    def __reduce__(self) -> tuple[Any, ...]:
        # Called once per message: all Buffers in it share the pickle of their loan.
        ack = self._handover.acks.expect()
        self._expected.append(ack)
        return _receive, (ack, *self._file)


def _reduce(value: Buffer) -> tuple[Any, ...]:
    """Pickle a Buffer: as a reference if it is large and of a loan, by value if not."""
    place = span_in_whole(value) if value.size >= MIN_BUFFER_BYTES else None
    if place is not None:
        whole, start, stop = place
        if isinstance(whole.shard_source, Loan) and whole.shard_source.sends_references:
            return _slice_of, (whole.shard_source, start, stop)
    by_value: tuple[Any, ...] = value.__reduce_ex__(_BY_VALUE_PROTOCOL)
    return by_value


def _slice_of(whole: Buffer, start: int, stop: int) -> Any:
    """Return a Buffer in the receiving process, where the loan is unpickled as the whole file."""
    return whole[start:stop]


def _receive(ack: Ack, path: str, inode: int, size_bytes: int, url: str) -> Buffer:
    """Return the whole file, mapped once in this process, and hand in the acknowledgement."""
    whole = _RECEIVED.get((path, inode))
    if whole is None:
        try:
            whole = Buffer.over(map_file(Path(path), size_bytes, inode, in_order=False))
        except OSError as exn:
            raise unreadable(exn, Path(path), url) from exn
        _RECEIVED[path, inode] = whole
    ack.hand_in()
    return whole


# The pickler of a DataLoader's queues. Pickles made by others may go anywhere, so they carry the
# bytes.
ForkingPickler.register(Buffer, _reduce)
