"""Decoders of text, numbers, arrays and objects. Each gets a member's bytes."""

import io
import json
import struct
from collections.abc import Iterator
from typing import Any


def text(data: Any) -> str:
    """Return text in UTF-8."""
    return bytes(data).decode()


def json_value(data: Any) -> Any:
    """Return the value of a JSON file."""
    return json.loads(bytes(data))


def npy(data: Any) -> Any:
    """Return the array of a `.npy` file."""
    from numpy.lib import format as npy_format

    return npy_format.read_array(io.BytesIO(data), allow_pickle=False)


def npz(data: Any) -> dict[str, Any]:
    """Return the arrays of a `.npz` file, by name."""
    import numpy as np

    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def msgpack_value(data: Any) -> Any:
    """Return the value of a MessagePack file."""
    import msgpack

    return msgpack.unpackb(bytes(data))


def tensor(data: Any) -> Any:
    """Return the object that `torch.save` has written, in the CPU's memory."""
    import torch

    # A tensor that was saved on a GPU would otherwise be loaded onto a GPU. The machine may have no
    # GPU, and DataLoader workers must not use it.
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def cbor_value(data: Any) -> Any:
    """Return the value of a CBOR file."""
    import cbor

    return cbor.loads(bytes(data))


# webdataset's format of several arrays (its module `tenbin`): chunks of 8 magic bytes, an int64
# length, and the content padded to a multiple of 64 bytes. An array is two chunks: a header of
# int64s (dtype, name, number of dimensions, size of each dimension), and its values.
_CHUNK_MAGIC = b"~TenBin~"
_CHUNK_ALIGNMENT_BYTES = 64
_CHUNK_HEADER = struct.Struct("<8sq")


def tenbin(data: Any) -> list[Any]:
    """Return the arrays of a `.ten` or `.tb` file."""
    chunks = list(_chunks(bytes(data)))
    if len(chunks) % 2:
        raise ValueError("the file ends after the header of an array")
    arrays = zip(chunks[::2], chunks[1::2], strict=True)
    return [_array_of(header, values) for header, values in arrays]


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the content of each chunk. Raises ValueError for a file that is not of this format."""
    offset = 0
    while offset < len(data):
        magic, size_bytes = _CHUNK_HEADER.unpack_from(data, offset)
        offset += _CHUNK_HEADER.size
        if magic != _CHUNK_MAGIC:
            raise ValueError("the file is not in the format of .ten and .tb files")
        if not 0 <= size_bytes <= len(data) - offset:
            raise ValueError("the file is truncated")
        yield data[offset : offset + size_bytes]
        # The content is padded, so its size is rounded up to whole units of the alignment.
        units = -(-size_bytes // _CHUNK_ALIGNMENT_BYTES)
        offset += units * _CHUNK_ALIGNMENT_BYTES


def _array_of(header: bytes, values: bytes) -> Any:
    """Return an array, given the contents of its two chunks."""
    import numpy as np

    # The first two of the header's int64s are text: the dtype and the name.
    dtype = header[:8].rstrip(b"\0").decode("ascii")
    numbers = np.frombuffer(header, dtype="<i8")
    dimensions = int(numbers[2])
    shape = tuple(map(int, numbers[3 : 3 + dimensions]))
    array = np.frombuffer(values, dtype=f"<{dtype}").reshape(shape)
    return array.copy()  # The copy owns its memory and is writable.
