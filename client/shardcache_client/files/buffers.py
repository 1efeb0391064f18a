"""Zero-copy values of samples: a run of a mapped shard's bytes, as a numpy array of a separate type.

This module needs numpy; the rest of the client does not. The type is an array because before Python 3.12 only C types
can export their memory, and a separate type because a loader would stack plain arrays and treat a memoryview as a list
of integers, whereas it does not touch `bytes`.
"""

import enum
import mmap
import pickle
from collections.abc import Collection
from typing import Any, SupportsIndex

from shardcache.errors import ConfigError
from shardcache.tarindex import Tables

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
        return _over_bytes, (self.tobytes(),)


def _over_bytes(data: bytes) -> Buffer:
    return np.frombuffer(data, np.uint8).view(Buffer)


def _run(value: Buffer | bytes | bytearray | memoryview) -> memoryview:
    return memoryview(value).cast("B") if memoryview(value).c_contiguous else memoryview(bytes(value))


class Form(enum.Enum):
    """Type of the values of one extension throughout a shard: `bytes`, Buffers, or either by size."""

    BYTES = enum.auto()
    VIEW = enum.auto()
    BY_SIZE = enum.auto()


def forms(tables: Tables, extensions: Collection[str] | None) -> list[Form]:
    """Return the form of each extension of a shard; only values of the given ones may be views (None for all).

    With BY_SIZE, `Values` decides per member, at the cost of a call.
    """
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
    """Slices a mapped shard: small runs become `bytes`, others Buffers."""

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
