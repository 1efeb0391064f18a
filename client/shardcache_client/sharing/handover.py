"""The hand-over of a shard's bytes from a DataLoader worker to its trainer, without a copy.

A Buffer is a run of a mapped file's bytes. Between processes, it is pickled as a reference to a
range of the file. The receiver maps the same file once, and keeps that map as long as any Buffer of
the file lives.

The file must stay cached until the receiver has mapped it. The cache does not evict files that a
process has mapped. So the worker keeps its own map as long as it has any Buffer of the shard, even
in a queue, or as long as a message with such a Buffer has not been acknowledged. A loan is the
worker's record of one such file, and is settled once neither is the case. Until then, the worker
also keeps its lease, so that the cache does not try to evict the file in vain.
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

# The first pickle protocol that handles large bytes well. Protocol 5 would put Buffers outside of
# the pickle, which does not work with a pipe.
_BY_VALUE_PROTOCOL = 4

_RECEIVED: weakref.WeakValueDictionary[tuple[str, int], Buffer] = weakref.WeakValueDictionary()
"""Whole shards from which this process has received Buffers, by path and inode.

An entry lasts as long as any Buffer of its shard.
"""


class Handover:
    """State shared by a process that receives Buffers and the workers that it starts.

    The receiving process is the process that created this object, or one that called
    `acks.receive_here`.

    Only workers that the receiving process starts send Buffers as references. The receiving process
    itself, and any other process that has a pickled copy of this object, send Buffers by value:
    no process is known to be able to follow their references.
    """

    def __init__(self, extensions: Collection[str] | None = None) -> None:
        """Begin a handover to this process.

        Args:
            extensions: extensions of the members that are passed without a copy; None for all.
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
        """Return the loan of a file that is mapped whole.

        The loan slices the file's bytes, and tracks when the file may be unmapped.

        Args:
            mapped: the map of the file.
            path: path at which other processes find the file while this process has it mapped; None
                if they cannot find it: they then get its bytes by value.
            inode: inode of the file.
            url: url of the shard.
        """
        return Loan(self, mapped, path, inode, url)

    def keep(self, loan: "Loan") -> None:
        """Hold a loan until it is settled, as the epoch may end while messages are in transit."""
        self._lent.add(loan)

    def settle(self) -> None:
        """Drop the loans that are settled, to free space for a shard that is waited for."""
        self._lent = {loan for loan in self._lent if not loan.settled()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lent": set()}  # the loans are of files that this process maps


class Loan:
    """One mapped shard, and the acknowledgements expected for Buffers that were sent.

    `Handover.lend` makes this object, and describes the arguments.
    """

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
        # The arguments of `_receive`, by which a receiver maps the file.
        self._file = (os.fspath(path or ""), inode, len(mapped), url)
        # Acknowledgements that have not arrived yet: one for each message that was sent.
        self._expected: list[Ack] = []
        self._whole: weakref.ref[Buffer] | None = None
        self._forms: list[Form] | None = None  # form of the values of each extension
        # Id of the process that sends references: this process, if it was started by the receiver,
        # and if the receiver can find the file; None otherwise.
        self._sender_pid: int | None = None
        if handover.acks.in_child_of_receiver and path is not None:
            self._sender_pid = os.getpid()

    def __repr__(self) -> str:
        path, *_ = self._file
        return f"Loan({path!r}, expected={len(self._expected)})"

    def whole(self) -> Buffer:
        """Return the shard's bytes, to slice samples from. A living slice keeps the loan open."""
        whole = self._whole_if_alive()
        if whole is None:
            whole = Buffer.over(self._map)
            whole.shard_source = self
            self._whole = weakref.ref(whole)
            if self.sends_references:
                self._handover.keep(self)
        return whole

    def columns(self, tables: Tables) -> list[SlicedColumn]:
        """Return the column of each extension, with the form of its values.

        Values that are copied do not keep the loan open.
        """
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
        """Return True if every Buffer that was sent has arrived.

        The answer is final only once the reader has dropped `whole()` and the last sample.
        """
        # Without references, no other process needs to find the file. Buffers in this process keep
        # the file mapped.
        if not self.sends_references:
            return True
        # This is checked before the acknowledgements, because a Buffer that lives may still be
        # sent.
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
        # In the receiving process, the loan becomes the Buffer of the whole file. This is called
        # once per message, as all Buffers in a message share the pickle of their loan.
        ack = self._handover.acks.expect()
        self._expected.append(ack)
        return _receive, (ack, *self._file)


def _reduce(value: Buffer) -> tuple[Any, ...]:
    """Pickle a Buffer: as a reference if it is large and belongs to a loan, otherwise by value."""
    place = span_in_whole(value) if value.size >= MIN_BUFFER_BYTES else None
    if place is not None:
        whole, start, stop = place
        if isinstance(whole.shard_source, Loan) and whole.shard_source.sends_references:
            return _slice_of, (whole.shard_source, start, stop)
    by_value: tuple[Any, ...] = value.__reduce_ex__(_BY_VALUE_PROTOCOL)
    return by_value


def _slice_of(whole: Buffer, start: int, stop: int) -> Any:
    """Return a slice of a Buffer in the receiving process.

    Args:
        whole: the whole file, which `_reduce` has passed as its loan; see `Loan.__reduce__`.
    """
    return whole[start:stop]


def _receive(ack: Ack, path: str, inode: int, size_bytes: int, url: str) -> Buffer:
    """Return the whole file, mapped once in this process, and acknowledge the message."""
    whole = _RECEIVED.get((path, inode))
    if whole is None:
        try:
            whole = Buffer.over(map_file(Path(path), size_bytes, inode, in_order=False))
        except OSError as exn:
            raise unreadable(exn, Path(path), url) from exn
        _RECEIVED[path, inode] = whole
    ack.hand_in()
    return whole


# A DataLoader's queues use this pickler, so its pickles go to the trainer. Pickles of other
# picklers may go anywhere, so these carry the bytes.
ForkingPickler.register(Buffer, _reduce)
