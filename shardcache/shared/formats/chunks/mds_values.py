"""Decoders of MDS columns, by MDS's names of the encodings.

The values are those that the Python package `streaming` returns. numpy and Pillow are imported only
when a column needs them.
"""

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from shardcache.shared.formats.format import Decoder
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

_PLACEHOLDER_BYTES = 4  # unused bytes at the beginning of a list
_MAX_DIGITS = 18  # maximum length of a dimension's text, so that the dimension fits into 64 bits

_SCALARS = frozenset(
    (
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ),
)

# An array states two types as numbers: that of the sizes in its shape, and that of its values.
_SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_VALUE_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


# Decoders of numbers that MDS stores as text, of lists, and of images


def _json(data: bytes) -> Any:
    return json.loads(data)


def _int_text(data: bytes) -> int:
    return int(text(data))


def _float_text(data: bytes) -> float:
    return float(text(data))


def _decimal_text(data: bytes) -> Decimal:
    return Decimal(text(data))


def _list_of(decode_item: Callable[[bytes], Any], data: bytes) -> list[Any]:
    """Return the values of a list, each decoded by `decode_item`."""
    return [decode_item(item) for item in items_of(data, start=_PLACEHOLDER_BYTES)]


def _image_files(data: bytes) -> list[Any]:
    """Return the PIL images of a list of image files; this list begins without a placeholder."""
    return [image_file(item) for item in items_of(data)]


IMAGE_FILES = frozenset(("jpeg", "png"))
"""The encodings of columns whose cells are image files."""

_PLAIN_DECODERS: dict[str, Decoder] = {
    "str": text,
    "int": number_decoder("q"),
    "str_int": _int_text,
    "str_float": _float_text,
    "str_decimal": _decimal_text,
    "json": _json,
}
_IMAGE_DECODERS: dict[str, Decoder] = {
    "pil": raw_image,
    "jpeg": image_file,
    "png": image_file,
    "jpeg_array": _image_files,
    "jpegarray": _image_files,
    "list[pil]": partial(_list_of, raw_image),
    "list[jpeg]": partial(_list_of, image_file),
    "list[png]": partial(_list_of, image_file),
}


def decoder(encoding: str) -> Decoder | None:
    """Return the decoder of an encoding; None for plain bytes.

    Raises UnsupportedShardError for an encoding that must not or cannot be decoded, ConfigError for
    a missing library.
    """
    if encoding == "bytes":
        return None
    if encoding in _PLAIN_DECODERS:
        return _PLAIN_DECODERS[encoding]
    if encoding in _IMAGE_DECODERS:
        check_pillow()
        return _IMAGE_DECODERS[encoding]
    if encoding == "pkl":
        raise pickled_error(encoding)
    if encoding in _SCALARS:
        check_numpy()
        return partial(_scalar, encoding)
    kind, _, details = encoding.partition(":")
    if kind == "ndarray":
        check_numpy()
        decode = _array_decoder(details)
        if decode is not None:
            return decode
    raise unsupported_error(encoding, "streaming")


def _scalar(dtype: str, data: bytes) -> Any:
    """Return a number as numpy's scalar of a type."""
    import numpy as np

    (value,) = np.frombuffer(data, dtype)
    return value


def _array_decoder(details: str) -> Decoder | None:
    """Return the decoder of arrays; None for details that are malformed.

    Args:
        details: the type and the shape that the encoding fixes, `DTYPE:DIM,DIM`. Either may be
            missing; each array then states it.
    """
    dtype, _, dimensions = details.partition(":")
    if dtype and dtype not in _SCALARS:
        return None
    shape: tuple[int, ...] = ()
    if dimensions:
        sizes = dimensions.split(",")
        if not all(size.isdecimal() and len(size) <= _MAX_DIGITS for size in sizes):
            return None
        shape = tuple(map(int, sizes))
    return partial(_array, dtype, shape)


def _array(dtype: str, shape: Sequence[int], data: bytes) -> Any:
    """Return an array over the bytes, which is read-only as in `streaming`.

    Args:
        dtype: type of the values; "" if the array states it.
        shape: shape of the array; empty if the array states it.
        data: bytes of the array.
    """
    import numpy as np

    # The type and the shape come before the values unless the encoding fixes them.
    at = 0
    if not dtype:
        dtype = _VALUE_DTYPES[data[0]]
        at = 1
    if not shape:
        # One byte holds both the number of dimensions and the type of their sizes.
        dimensions, type_number = divmod(data[at], len(_SHAPE_DTYPES))
        at += 1
        sizes = np.frombuffer(data, _SHAPE_DTYPES[type_number], dimensions, at)
        shape = tuple(map(int, sizes))
        at += sizes.nbytes
    values = np.frombuffer(data, dtype, offset=at)
    if math.prod(shape) != values.size:
        raise ValueError(f"{values.size} values do not fill the shape {tuple(shape)}")
    return values.reshape(shape)
