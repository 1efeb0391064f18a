"""The hand-over of a shard's bytes from a DataLoader worker to its trainer, without a copy.

The trainer is the process that runs the training loop. A Buffer is a run of a mapped file's bytes.
The worker pickles it as a reference to a range of the file. The trainer maps the same file once,
and keeps that map as long as any Buffer of the file lives.

The file must stay cached until the trainer has mapped it. The cache does not evict files that a
process has mapped, so the worker keeps its own map until then. A `Loan` is the worker's record of
one mapped file. It is settled once the worker has no Buffer of the file, not even in a queue, and
all messages with such Buffers were acknowledged. Until then, the worker also keeps the file's
lease, the daemon's promise that the shard stays cached: otherwise the daemon would try, in vain, to
evict the file.
"""

import mmap
import os
import weakref
from collections.abc import Collection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.tarindex.tables import Tables
from shardcache_client.samples.mapped_file import map_file, unreadable
from shardcache_client.samples.slicing import SlicedColumn, Slices, undecoded_columns
from shardcache_client.sharing.acks import Ack, Acks
from shardcache_client.sharing.buffer import MIN_BUFFER_BYTES, Buffer, span_of
from shardcache_client.sharing.value_forms import Form, ValuesBySize, forms_of

# The first pickle protocol that handles large bytes well. With protocol 5, a Buffer would be
# pickled out of band, which does not work with a pipe.
_BY_VALUE_PROTOCOL = 4

_RECEIVED: weakref.WeakValueDictionary[tuple[str, int], Buffer] = weakref.WeakValueDictionary()
"""Whole shards, mapped here, of which this process has received Buffers. By path and inode.

An entry lasts as long as any Buffer of its shard.
"""


class Handover:
    """The acknowledgements and loans of a process that receives Buffers and its workers.

    The receiver is the process that created this object, or one that called `acks.receive_here`.

    Only workers that the receiver has started send Buffers as references. Other processes, and the
    receiver itself, send them by value, because the process that gets them may not be able to
    follow references.
    """

    def __init__(self, extensions: Collection[str] | None = None) -> None:
        """Make this process the receiver.

        Args:
            extensions: extensions of the members that are handed over without a copy; None for all.
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
        """Return the loan of a file of which all bytes are mapped.

        The loan slices the file's bytes, and knows when the file may be unmapped.

        Args:
            mapped: the map of the file.
            path: path at which other processes find the file while this process has it mapped; None
                if they cannot find it, and get its bytes by value.
            inode: inode of the file.
            url: url of the shard.
        """
        return Loan(self, mapped, path, inode, url)

    def keep(self, loan: "Loan") -> None:
        """Hold a loan until it is settled, as the epoch may end while messages are in transit."""
        self._lent.add(loan)

    def settle(self) -> None:
        """Drop the loans that are settled, so that the daemon can evict their files."""
        self._lent = {loan for loan in self._lent if not loan.is_settled()}

    def __getstate__(self) -> dict[str, Any]:
        # Loans are not pickled, as they are of files that this process has mapped.
        return self.__dict__ | {"_lent": set()}


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
        # Arguments of `_receive`, after the first.
        self._file = (os.fspath(path or ""), inode, len(mapped), url)
        # Acknowledgements that have not arrived yet: one for each message that was sent.
        self._expected: list[Ack] = []
        self._whole: weakref.ref[Buffer] | None = None
        self._forms: list[Form] | None = None  # form of the values of each extension
        # Id of the process that sends references; None if none does. This process does if the
        # receiver has started it, and can find the file.
        self._sender_pid: int | None = None
        if handover.acks.is_child_of_receiver and path is not None:
            self._sender_pid = os.getpid()

    def __repr__(self) -> str:
        path, *_ = self._file
        return f"Loan({path!r}, expected={len(self._expected)})"

    def whole(self) -> Buffer:
        """Return the whole shard. While this Buffer or a slice lives, the loan is not settled."""
        whole = self._whole_if_alive()
        if whole is None:
            whole = Buffer.over(self._map)
            whole.loan = self
            self._whole = weakref.ref(whole)
            if self.sends_references:
                self._handover.keep(self)
        return whole

    def columns(self, tables: Tables) -> list[SlicedColumn]:
        """Return a column for each extension, which slices its values from the shard.

        Values that are copied do not keep the loan from being settled.
        """
        if self._forms is None:
            self._forms = forms_of(tables, self._handover.extensions)
        if Form.VIEW not in self._forms and Form.BY_SIZE not in self._forms:
            return undecoded_columns(tables.extensions, self._map)

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

    def is_settled(self) -> bool:
        """Return True if every Buffer that was sent has arrived.

        True is final only once the reader has dropped `whole()` and the last sample.
        """
        # Without references, no other process needs to find the file. Buffers in this process keep
        # the file mapped.
        if not self.sends_references:
            return True
        # This is checked before the acknowledgements, because a Buffer that lives may still be
        # sent.
        if self._whole_if_alive() is not None:
            return False
        acks = self._handover.acks
        self._expected = [ack for ack in self._expected if not acks.collect(ack)]
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
    """Return how to pickle a Buffer: as a reference if it is large and on loan, else by value."""
    span = span_of(value) if value.size >= MIN_BUFFER_BYTES else None
    if span is not None:
        loan = span.whole.loan
        if isinstance(loan, Loan) and loan.sends_references:
            return _slice_of, (loan, span.start, span.stop)
    by_value: tuple[Any, ...] = value.__reduce_ex__(_BY_VALUE_PROTOCOL)
    return by_value


def _slice_of(whole: Buffer, start: int, stop: int) -> Any:
    """Return a slice of a Buffer in the receiving process.

    Args:
        whole: the whole file. `_reduce` passes its loan, which unpickling turns into the file; see
            `Loan.__reduce__`.
        start: index of the slice's first byte.
        stop: index of the byte after the slice's last one.
    """
    return whole[start:stop]


def _receive(ack: Ack, path: str, inode: int, size_bytes: int, url: str) -> Buffer:
    """Return the whole file, mapped once in this process, and acknowledge the message.

    Args:
        ack: the acknowledgement that came with the message.
        path: path of the file.
        inode: inode of the file.
        size_bytes: size of the file.
        url: url of the shard.
    """
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
