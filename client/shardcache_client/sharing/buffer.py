"""Zero-copy values of samples: a Buffer is a run of a mapped shard's bytes.

Datasets with `zero_copy` yield Buffers in place of `bytes`. Buffers need numpy; the rest of the
client does not. A Buffer is a numpy array because before Python 3.12 only types written in C can
export their memory. It is not a plain array, because torch's collating would stack plain arrays.
A DataLoader worker sends Buffers to its trainer, the process that runs the training loop, without a
copy: see `handover`.
"""

import mmap
import pickle
from typing import Any, NamedTuple, SupportsIndex

from shardcache.shared.exceptions import ConfigError

try:
    import numpy as np
except ImportError as exn:
    raise ConfigError(
        "zero_copy needs numpy, which is not installed", remedy="pip install numpy"
    ) from exn

MIN_BUFFER_BYTES = 4096
"""Minimum size of a Buffer. Smaller runs are `bytes`, as copying them is cheaper than a view."""

_BYTE = np.dtype(np.uint8)  # a singleton in numpy, so that comparing by identity is enough
_BYTES_LIKE = (bytes, bytearray, memoryview)
_OUT_OF_BAND_PROTOCOL = 5  # the first pickle protocol with buffers outside of the pickle
_SHOWN_BYTES = 16  # number of bytes in a Buffer's repr


class Buffer(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A read-only, one-dimensional uint8 array over bytes of a mapped file, made without a copy.

    Accepted wherever a bytes-like object is: `torch.frombuffer`, `io.BytesIO`, `numpy.frombuffer`.
    For functions that accept only `bytes`, such as `json.loads`, `bytes(value)` makes a copy.
    Slices are Buffers as well, and keep the file mapped as long as they live.

    A Buffer behaves like `bytes` in:

    - conversions: `int`, `float`, `bool`, `str`
    - `hash`, `in`, and comparisons with bytes-like objects
    - methods that only `bytes` has, such as `decode` and `startswith`

    It behaves like an array in all else, such as arithmetic, access to elements, and comparisons
    with numbers and arrays. The results of arithmetic, and of methods that change the dtype or the
    shape, are plain numpy arrays.

    When pickled, it becomes a Buffer over a copy of its bytes. Only on the way from a DataLoader
    worker to its trainer, `handover` replaces the copy by a reference to the mapped file.
    """

    loan: object = None
    """The shard's `handover.Loan`, by which `handover` pickles slices of this Buffer as references.

    None unless this is the Buffer of a whole shard that a DataLoader worker has mapped. The type is
    `object` because `handover` imports this module.
    """
    address: int | None = None
    """Start address in memory of a whole shard's Buffer; None until it is computed."""

    @staticmethod
    def over(data: bytes | bytearray | memoryview | mmap.mmap | pickle.PickleBuffer) -> "Buffer":
        """Return all bytes of `data` as a Buffer.

        While the Buffer lives, `data` cannot be closed or resized.
        """
        return np.frombuffer(memoryview(data).toreadonly(), np.uint8).view(Buffer)

    def __getattr__(self, name: str) -> Any:
        # A special method of `bytes`, such as pickle's `__getnewargs__`, would be a protocol that a
        # Buffer does not follow.
        if name.startswith("_") or not hasattr(bytes, name):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.tobytes(), name)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, (Buffer, *_BYTES_LIKE)):
            return _contiguous_bytes(self) == _contiguous_bytes(other)
        if isinstance(other, np.ndarray | np.generic | int | float):
            return np.asarray(self) == other
        return NotImplemented

    def __ne__(self, other: object) -> Any:
        equal = self.__eq__(other)
        if equal is NotImplemented:
            return NotImplemented
        if isinstance(equal, bool):
            return not equal
        return ~equal

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
        ellipsis = "…" if self.size > _SHOWN_BYTES else ""
        return f"Buffer({self[:_SHOWN_BYTES].tobytes()!r}{ellipsis}, bytes={self.size})"

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # numpy calls this with each result of arithmetic. `return_scalar` is not used, since numpy
        # before 2.0 does not pass it.
        if array.ndim == 0:
            return array[()]  # turns an array without dimensions into a scalar
        return np.asarray(array)

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
        # Some operations of numpy, such as `value[None]`, make Buffers of another dtype or shape.
        # They are pickled as plain arrays.
        if self.dtype is not _BYTE or self.ndim != 1:
            return np.asarray(self).__reduce_ex__(protocol)
        if int(protocol) >= _OUT_OF_BAND_PROTOCOL and self.flags.c_contiguous:
            return Buffer.over, (pickle.PickleBuffer(self.data),)
        return Buffer.over, (self.tobytes(),)


def _contiguous_bytes(value: Buffer | bytes | bytearray | memoryview) -> memoryview:
    """Return the bytes of a value in one piece, copied if they are scattered in memory."""
    view = memoryview(value)
    if view.c_contiguous:
        return view.cast("B")
    return memoryview(bytes(value))


class Span(NamedTuple):
    """A slice of a Buffer.

    Attributes:
        whole: the Buffer.
        start: index in `whole` of the slice's first byte.
        stop: index in `whole` of the byte after the slice's last one.
    """

    whole: Buffer
    start: int
    stop: int


def span_of(value: Buffer) -> Span | None:
    """Return the span of `value` in the Buffer that it was sliced from, which may be itself.

    Returns None if `value` is not a contiguous slice of bytes.
    """
    if value.dtype is not _BYTE or value.ndim != 1 or not value.flags.c_contiguous:
        return None
    # The base of a slice is the Buffer that it was sliced from. If that is a slice as well, numpy
    # uses its base instead, so `whole` is never a slice.
    whole = value.base if isinstance(value.base, Buffer) else value
    if whole.address is None:
        whole.address = _address(whole)
    if value.size == 0:
        return Span(whole, 0, 0)  # an empty slice may have any address
    start = _address(value) - whole.address
    return Span(whole, start, start + value.size)


def _address(value: Buffer) -> int:
    """Return the address in memory of a value's first byte."""
    address: int = value.__array_interface__["data"][0]  # slow, but other ways are slower
    return address


def collate_buffers(batch: list[Buffer], *, collate_fn_map: object = None) -> list[Buffer]:
    """Return the list of Buffers as it is, as torch's collating does with a list of `bytes`.

    The function is an entry for torch's `default_collate_fn_map`, which defines its arguments.
    """
    return batch
