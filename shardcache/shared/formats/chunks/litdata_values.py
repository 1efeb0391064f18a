"""Decoders of LitData's leaves, by their encodings.

A leaf is one value of a sample. Its encoding is its entry in the list `data_format` of the dataset:
a kind, which may be followed by a colon and details, such as `no_header_numpy:9` for an array of
float32. The values are those that `litdata` returns. torch, numpy and Pillow are imported only when
a leaf needs them.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from shardcache.shared.formats.format import Decoder, missing_package_error
from shardcache.shared.formats.plain_values import (
    check_numpy,
    check_pillow,
    image_file,
    items_of,
    number_decoder,
    pickled_error,
    raw_image,
    text,
    unsupported_error,
)

# LitData writes a type as its index in one of these lists, which have LitData's order. Some of
# torch's types have two names, and so two indexes.
_TORCH_DTYPES = (
    "float32",
    "float32",
    "float64",
    "float64",
    "complex64",
    "complex64",
    "complex128",
    "complex128",
    "float16",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int16",
    "int32",
    "int32",
    "int64",
    "int64",
    "bool",
    "uint16",
)
_NUMPY_DTYPES = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
)
# A tensor or array begins with the index of its type, and the number of its dimensions. LitData
# writes them in big-endian order for tensors, and in little-endian order for arrays.
_TENSOR_HEAD = struct.Struct(">2I")
_ARRAY_HEAD = struct.Struct("<2I")
_MAX_DIMENSIONS = 64
# Encodings of pickled leaves, which are refused, since unpickling them could run any code.
_PICKLED = frozenset(("pickle", "graph", "graph:pickle"))

IMAGE_FILES = frozenset(("jpeg", "image"))
"""The encodings, up to a colon, of leaves that are image files."""


def _flag(data: bytes) -> bool:
    """Return the value of a leaf of the type bool."""
    return data[0] != 0


_PLAIN_DECODERS: dict[str, Decoder] = {
    "str": text,
    "text": text,
    "int": number_decoder("q"),
    "float": number_decoder("d"),
    "bool": _flag,
}


def decoder(encoding: str) -> Decoder | None:
    """Return the decoder of leaves with this encoding; None for plain bytes.

    Raises UnsupportedShardError for an encoding that must not or cannot be decoded, ConfigError for
    a missing library.
    """
    kind, _, details = encoding.partition(":")
    if kind in ("bytes", "file"):
        return None
    if encoding in _PLAIN_DECODERS:
        return _PLAIN_DECODERS[encoding]
    if encoding in _PICKLED:
        raise pickled_error(encoding)
    if encoding == "pil":
        check_pillow()
        return raw_image
    if kind in IMAGE_FILES or kind == "jpeg_array":
        check_pillow()
        _check_torch()
        return _images if kind == "jpeg_array" else _image
    decode = _numbers_decoder(kind, details)
    if decode is None:
        raise unsupported_error(encoding, "litdata")
    return decode


def _numbers_decoder(kind: str, details: str) -> Callable[[bytes], Any] | None:
    """Return the decoder of arrays or tensors; None for any other kind.

    Args:
        kind: the encoding up to its first colon.
        details: the encoding after that colon: the index of a type, or empty.
    """
    if kind == "numpy":
        check_numpy()
        return _array
    if kind == "tensor":
        _check_torch()
        return _tensor
    if not details.isdecimal():
        return None
    type_index = int(details)
    if kind == "no_header_numpy" and type_index < len(_NUMPY_DTYPES):
        check_numpy()
        return partial(_plain_array, _NUMPY_DTYPES[type_index])
    if kind == "no_header_tensor" and type_index < len(_TORCH_DTYPES):
        _check_torch()
        return partial(_plain_tensor, _TORCH_DTYPES[type_index])
    return None


def _check_torch() -> None:
    """Raise ConfigError unless torch and numpy are installed."""
    check_numpy()
    try:
        import torch  # noqa: F401
    except ImportError as exn:
        raise missing_package_error("torch", "making tensors") from exn


def _image(data: bytes) -> Any:
    """Return an image file as an RGB tensor of the shape (3, height, width).

    A JPEG is turned upright as its EXIF data says.
    """
    import numpy as np
    import torch
    from PIL import ImageOps

    with image_file(data) as image:
        upright = ImageOps.exif_transpose(image) if image.format == "JPEG" else image
        pixels = np.array(upright.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _images(data: bytes) -> list[Any]:
    """Return the tensors of a list of image files."""
    return [_image(item) for item in items_of(data)]


def _plain_tensor(dtype: str, data: bytes) -> Any:
    """Return the tensor of one dimension with the values that the bytes hold."""
    import torch

    torch_dtype = getattr(torch, dtype)
    if not data:
        return torch.empty((0,), dtype=torch_dtype)
    # The copy makes the tensor writable.
    return torch.frombuffer(bytearray(data), dtype=torch_dtype)


def _tensor(data: bytes) -> Any:
    """Return the tensor whose type and shape come before its values."""
    type_index, dimensions = _TENSOR_HEAD.unpack_from(data)
    shape, values = _shape_and_values(data, _TENSOR_HEAD.size, dimensions, byte_order=">")
    return _plain_tensor(_TORCH_DTYPES[type_index], values).reshape(shape)


def _plain_array(dtype: str, data: bytes) -> Any:
    """Return the array of one dimension with the values that the bytes hold."""
    import numpy as np

    return np.frombuffer(data, dtype).copy()  # the copy makes the array writable


def _array(data: bytes) -> Any:
    """Return the array whose type and shape come before its values."""
    type_index, dimensions = _ARRAY_HEAD.unpack_from(data)
    shape, values = _shape_and_values(data, _ARRAY_HEAD.size, dimensions, byte_order="<")
    return _plain_array(_NUMPY_DTYPES[type_index], values).reshape(shape)


def _shape_and_values(
    data: bytes,
    at: int,
    dimensions: int,
    byte_order: str,
) -> tuple[tuple[int, ...], bytes]:
    """Return the shape at an offset, and the bytes of the values, which are all after the shape.

    Args:
        data: bytes of the leaf.
        at: offset of the shape.
        dimensions: number of dimensions.
        byte_order: byte order of the shape's numbers: "<" or ">", as in `struct`.
    """
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"{dimensions} dimensions")
    packed_shape = struct.Struct(f"{byte_order}{dimensions}I")
    shape = packed_shape.unpack_from(data, at)
    values = data[at + packed_shape.size :]
    return shape, values
