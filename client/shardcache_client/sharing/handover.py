"""Zero-copy values of samples, and the hand-over of a shard's bytes from a DataLoader worker to its trainer.

This module needs numpy; the rest of the client does not. A Buffer is a run of a mapped shard's bytes, as a numpy array
of a separate type: an array because before Python 3.12 only C types can export their memory, and a separate type
because a loader would stack plain arrays and treat a memoryview as a list of integers, whereas it does not touch bytes.

Between processes, a Buffer is pickled as a reference to a range of a file. The receiver maps the same file, once for as
long as any Buffer of it lives there. Until then the file must stay cached, so the worker keeps its own map until it
holds no Buffer of the shard any more, in any queue, and has an acknowledgement for every message in which one was sent.
The cache does not evict files mapped by any process; keeping the lease for as long saves it the attempt.
"""

import enum
import mmap
import os
import pickle
import struct
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from secrets import randbits
from typing import Any, SupportsIndex

from shardcache.errors import ConfigError
from shardcache.tarindex.tables import Tables
from shardcache_client.files import Column, Slices, as_bytes, map_file, unreadable
from shardcache_client.sharing.file_locks import reopened, take

try:
    import numpy as np
except ImportError as exn:
    raise ConfigError("zero_copy needs numpy, which is not installed", remedy="pip install numpy") from exn


WORTH_IT_BYTES = 4096
"""Minimum size of a Buffer: smaller runs are cheaper to copy than to reference, and are `bytes`."""

_BYTE = np.dtype(np.uint8)  # a singleton in numpy: comparing identity is enough, and fast

_BYTES_LIKE = (bytes, bytearray, memoryview)


class Buffer(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A read-only, one-dimensional uint8 array over bytes of a mapped file, made without a copy.

    Accepted wherever a bytes-like object is: `torch.frombuffer`, `io.BytesIO`, `numpy.frombuffer`; `bytes(value)` makes
    a copy for functions that accept only `bytes`, such as `json.loads`. Slices are Buffers as well, and keep the file
    mapped as long as they live. Results with another dtype or shape, or of arithmetic, are plain numpy.

    It converts and compares like `bytes`, not like numbers: `int`, `float`, `bool`, `str`, `hash`, `in`, `==` and `!=`
    with bytes-like objects, and all methods of `bytes`, such as `decode` and `startswith`. Compared with numbers and
    arrays, in arithmetic and in access to elements, it behaves as an array.

    Pickled, it becomes a Buffer over a copy of its bytes, unless `handover` can pass a reference to the other process.
    """

    shard_source: object = None
    """For a whole shard's Buffer: the loan that its slices reference when pickled, instead of carrying their bytes."""
    address: int | None = None
    """For a whole shard's Buffer: its start address in memory, once computed."""

    @staticmethod
    def over(data: bytes | bytearray | memoryview | mmap.mmap | pickle.PickleBuffer) -> "Buffer":
        """Return all bytes of `data` as a Buffer, which keeps `data` from being closed or resized while it lives."""
        return np.frombuffer(memoryview(data).toreadonly(), np.uint8).view(Buffer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(bytes, name):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.tobytes(), name)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, (Buffer, *_BYTES_LIKE)):
            return _run(self) == _run(other)
        if isinstance(other, np.ndarray | np.generic | int | float):
            return np.asarray(self) == other
        return NotImplemented

    def __ne__(self, other: object) -> Any:
        equal = self.__eq__(other)
        if equal is NotImplemented:
            return NotImplemented
        return not equal if isinstance(equal, bool) else ~equal

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.tobytes())

    def __contains__(self, other: object) -> bool:
        return other in self.tobytes()  # type: ignore[operator]

    def __bool__(self) -> bool:
        return self.size > 0

    def __int__(self) -> int:
        return int(self.tobytes())

    def __float__(self) -> float:
        return float(self.tobytes())

    def __str__(self) -> str:
        return str(self.tobytes())

    def __repr__(self) -> str:
        return f"Buffer({self[:16].tobytes()!r}{'…' if self.size > 16 else ''}, bytes={self.size})"

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if array.ndim == 0 else np.asarray(array)

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        """Return a plain numpy array."""
        return np.asarray(self).astype(*args, **kwargs)

    def reshape(self, *args: Any, **kwargs: Any) -> Any:
        """Return a plain numpy array."""
        return np.asarray(self).reshape(*args, **kwargs)

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Return a plain numpy array, unless another type is named."""
        return np.asarray(self).view(*args, **kwargs)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        """Return a plain, writable numpy array."""
        return np.asarray(self).copy(*args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.dtype is not _BYTE or self.ndim != 1:
            return np.asarray(self).__reduce_ex__(protocol)
        if int(protocol) >= 5 and self.flags.c_contiguous:
            return Buffer.over, (pickle.PickleBuffer(self.data),)
        return Buffer.over, (self.tobytes(),)


def _run(value: Buffer | bytes | bytearray | memoryview) -> memoryview:
    return memoryview(value).cast("B") if memoryview(value).c_contiguous else memoryview(bytes(value))


class Form(enum.Enum):
    """Type of the values of one extension throughout a shard: `bytes`, Buffers, or either by size (see `Values`)."""

    BYTES = enum.auto()
    VIEW = enum.auto()
    BY_SIZE = enum.auto()


def forms(tables: Tables, extensions: Collection[str] | None) -> list[Form]:
    """Return the form of each extension of a shard; only values of the given ones may be views (None for all)."""
    count = len(tables.extensions)
    ids, sizes = np.asarray(tables.extension_ids), np.asarray(tables.ends) - np.asarray(tables.starts)
    small, large = np.bincount(ids, sizes < WORTH_IT_BYTES, count), np.bincount(ids, sizes >= WORTH_IT_BYTES, count)
    found = []
    for number, extension in enumerate(tables.extensions):
        if not large[number] or (extensions is not None and extension not in extensions):
            found.append(Form.BYTES)
        else:
            found.append(Form.BY_SIZE if small[number] else Form.VIEW)
    return found


class Values:
    """Slices a mapped shard: small runs become `bytes`, others Buffers, at the cost of a call for each."""

    def __init__(self, mapped: mmap.mmap, whole: Buffer) -> None:
        self._map = mapped
        self._whole = whole

    def __getitem__(self, run: slice) -> bytes | Buffer:
        """Return the value of a run of bytes; the slice must have start and stop."""
        if run.stop - run.start < WORTH_IT_BYTES:
            return self._map[run]
        return self._whole[run]  # type: ignore[return-value]


def span(value: Buffer) -> tuple[Buffer, int, int] | None:
    """Return the Buffer that `value` is a slice of, with start and stop; None if it is not a contiguous slice."""
    whole = value.base if isinstance(value.base, Buffer) else value
    if value.dtype is not _BYTE or value.ndim != 1 or not value.flags.c_contiguous:
        return None
    if whole.address is None:
        whole.address = _address(whole)
    start = _address(value) - whole.address if value.size else 0
    return whole, start, start + value.size


def _address(value: Buffer) -> int:
    address: int = value.__array_interface__["data"][0]  # not cheap, but the alternatives cost more
    return address


def pass_on(batch: list[Buffer], *, collate_fn_map: object = None) -> list[Buffer]:
    """Collate Buffers as torch collates `bytes`: not at all. For torch's `default_collate_fn_map`."""
    return batch


# Acknowledgements and loans

_BY_VALUE = 4  # first pickle protocol that handles large bytes well; out-of-band buffers of 5 do not suit pipes
_NUMBER = struct.Struct("<Q")
_CELLS = 1 << 20  # of one process; address space only: the few cells in use at a time are reused

_ALL_ACKS: "weakref.WeakValueDictionary[int, Acks]" = weakref.WeakValueDictionary()
_WHOLES: weakref.WeakValueDictionary[tuple[str, int], Buffer] = weakref.WeakValueDictionary()
"""Shards from which this process has received Buffers, as long as any of these live."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The acknowledgement sent along with one message: name of its `Acks`, cell, and the number to write there."""

    name: int
    cell: int
    number: int

    def hand_in(self) -> None:
        """Acknowledge the message to its sender. Raises ConfigError if this process has no way to do so."""
        acks = _ALL_ACKS.get(self.name)
        if acks is None:
            raise ConfigError(
                "a zero-copy value arrived in a process that does not have its dataset, or no longer has it",
                remedy="keep the dataset while its values are in transit; to other processes, send bytes(value)",
            )
        os.pwrite(acks.fd, _NUMBER.pack(self.number), self.cell * _NUMBER.size)


@dataclass(slots=True)
class _Cells:
    """The cells reserved for one sending process during its lifetime."""

    pid: int
    fresh: Iterator[int]
    free: list[int] = field(default_factory=list)


class Acks:
    """Acknowledgements between related processes that messages have arrived, whatever channel they took.

    Sender and receiver share a memfd, an unnamed file that vanishes with the last process that holds it. The sender
    chooses a cell of it and a random number; the receiver of the message writes the number into the cell. Handing in an
    acknowledgement twice has no effect, several receivers need no lock, and a late acknowledgement for a sender that is
    gone does not confuse the next one.

    Shared with forked and spawned children. A copy pickled for any other purpose is a new set.
    """

    def __init__(self) -> None:
        self._own(os.memfd_create("shardcache-receipts"), randbits(64), os.getpid())

    def __repr__(self) -> str:
        return f"Acks({self._name:016x}, inherited={self.inherited})"

    def _own(self, fd: int, name: int, receiver_pid: int) -> None:
        self.fd, self._name, self._receiver_pid = fd, name, receiver_pid
        self._cells: _Cells | None = None
        weakref.finalize(self, os.close, fd)
        _ALL_ACKS[name] = self

    def receive_here(self) -> None:
        """Make this process the receiver, whichever process created the acknowledgements."""
        self._receiver_pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """True if the process that started this one is the receiver."""
        return os.getpid() != self._receiver_pid

    def expect(self) -> Ack:
        """Return an acknowledgement to be sent along with a message. Thread-safe."""
        cells = self._cells_here()
        try:
            cell = cells.free.pop()
        except IndexError:
            cell = next(cells.fresh)
        return Ack(self._name, cell, randbits(64))

    def came(self, ack: Ack) -> bool:
        """Return True if an acknowledgement that this process expects was handed in; do not ask for it again."""
        if os.pread(self.fd, _NUMBER.size, ack.cell * _NUMBER.size) != _NUMBER.pack(ack.number):
            return False
        self._cells_here().free.append(ack.cell)
        return True

    def _cells_here(self) -> _Cells:
        if self._cells is None or self._cells.pid != os.getpid():  # those of the process that forked this one
            fd = reopened(self.fd)  # its lock is released when this process ends, however it ends
            number = next(number for number in count() if take(fd, number))
            self._cells = _Cells(os.getpid(), count(number * _CELLS))
            weakref.finalize(self, os.close, fd)
        return self._cells

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return Acks, ()
        return _attach, (DupFd(self.fd), self._name, self._receiver_pid)


def _attach(duplicate: Any, name: int, receiver_pid: int) -> Acks:
    acks = Acks.__new__(Acks)
    acks._own(duplicate.detach(), name, receiver_pid)
    return acks


class Handover:
    """Shared by the receiving process, which created it or claimed the role, and the workers that it starts.

    In the receiving process, and in copies pickled for any other purpose, Buffers are sent by value, as no other
    process is known to be able to follow a reference.
    """

    def __init__(self, extensions: Collection[str] | None = None) -> None:
        self.extensions = extensions  # of the members passed without a copy; None for all
        self.acks = Acks()
        self._lent: set[Loan] = set()

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
        """Return the loan of a file mapped whole, which slices its bytes and tracks when it may be unmapped.

        At `path`, other processes find the file while this one has it mapped; with None, they get its bytes by value.
        """
        return Loan(self, mapped, path, inode, url)

    def keep(self, loan: "Loan") -> None:
        """Hold a loan until it is settled: the epoch may end while its last messages are still in transit."""
        self._lent.add(loan)

    def settle(self) -> None:
        """Drop the loans that are settled, to free space for a shard that the reader may wait for."""
        self._lent = {loan for loan in self._lent if not loan.settled()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lent": set()}


class Loan:
    """One mapped shard, and the acknowledgements still expected for its Buffers sent to other processes."""

    def __init__(self, handover: Handover, mapped: mmap.mmap, path: Path | None, inode: int, url: str) -> None:
        self._handover = handover
        self._map = mapped
        self._file = (os.fspath(path or ""), inode, len(mapped), url)
        self._expected: list[Ack] = []
        self._whole: weakref.ref[Buffer] | None = None
        self._forms: list[Form] | None = None
        self._sender_pid = os.getpid() if handover.acks.inherited and path is not None else None

    def __repr__(self) -> str:
        return f"Loan({self._file[0]!r}, expected={len(self._expected)})"

    def whole(self) -> Buffer:
        """Return the shard's bytes, to slice samples from. Every slice keeps the loan open."""
        whole = self._living()
        if whole is None:
            whole = Buffer.over(self._map)
            whole.shard_source = self
            self._whole = weakref.ref(whole)
            if self.refers:
                self._handover.keep(self)
        return whole

    def columns(self, tables: Tables) -> list[Column]:
        """Return the column of each extension; values that are copied do not keep the loan open."""
        if self._forms is None:
            self._forms = forms(tables, self._handover.extensions)
        if Form.VIEW not in self._forms and Form.BY_SIZE not in self._forms:
            return as_bytes(tables.extensions, self._map)
        whole = self.whole()
        slices: dict[Form, Slices] = {Form.BYTES: self._map, Form.VIEW: whole, Form.BY_SIZE: Values(self._map, whole)}
        return [(extension, slices[form]) for extension, form in zip(tables.extensions, self._forms, strict=True)]

    @property
    def refers(self) -> bool:
        """True if Buffers are sent as references: in the process that made the loan, if its parent can follow them."""
        return os.getpid() == self._sender_pid

    def settled(self) -> bool:
        """Return True, once the reader has dropped `whole()` and the last sample, if everything sent has arrived."""
        if not self.refers:
            return True  # the Buffers themselves keep the map, and no other process needs to find the file
        # In this order, as a Buffer may be sent as long as it lives.
        if self._living() is not None:
            return False
        self._expected = [ack for ack in self._expected if not self._handover.acks.came(ack)]
        return not self._expected

    def _living(self) -> Buffer | None:
        return None if self._whole is None else self._whole()

    def __reduce__(self) -> tuple[Any, ...]:
        # Called once per message, as all Buffers in it share the pickled form of their loan.
        ack = self._handover.acks.expect()
        self._expected.append(ack)
        return _receive, (ack, *self._file)


def _reduce(value: Buffer) -> tuple[Any, ...]:
    place = span(value) if value.size >= WORTH_IT_BYTES else None
    if place is not None:
        whole, start, stop = place
        if isinstance(whole.shard_source, Loan) and whole.shard_source.refers:
            return _cut, (whole.shard_source, start, stop)
    by_value: tuple[Any, ...] = value.__reduce_ex__(_BY_VALUE)
    return by_value


def _cut(whole: Buffer, start: int, stop: int) -> Any:
    return whole[start:stop]


def _receive(ack: Ack, path: str, inode: int, size_bytes: int, url: str) -> Buffer:
    """Map the file, unless it is mapped already, hand in the acknowledgement, and return the whole file."""
    whole = _WHOLES.get((path, inode))
    if whole is None:
        try:
            whole = Buffer.over(map_file(Path(path), size_bytes, inode, in_order=False))
        except OSError as exn:
            raise unreadable(exn, Path(path), url) from exn
        _WHOLES[path, inode] = whole
    ack.hand_in()
    return whole


# The pickler of a DataLoader's queues. Pickles made by others may go anywhere, so they carry the bytes.
ForkingPickler.register(Buffer, _reduce)
