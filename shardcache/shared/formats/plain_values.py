"""Decoders of values that several formats store in the same way, and their common errors.

MDS and LitData (`chunks`) use most of them. numpy and Pillow are imported only when needed.
"""

import io
from collections.abc import Callable
from struct import Struct
from typing import Any

from shardcache.shared.exceptions import UnsupportedShardError
from shardcache.shared.formats.format import missing_package_error

_U32 = Struct("<I")
_IMAGE_HEAD = Struct("<3I")  # width, height, and length of the mode's name in bytes


def text(data: bytes) -> str:
    """Return UTF-8 text."""
    return str(data, "utf-8")


def number_decoder(code: str) -> Callable[[bytes], Any]:
    """Return the decoder of one little-endian number with this code in `struct`."""
    packed = Struct("<" + code)

    def number(data: bytes) -> Any:
        return packed.unpack(data)[0]

    return number


def raw_image(data: bytes) -> Any:
    """Return the PIL image that is stored as size, name of its mode, and uncompressed pixels."""
    from PIL import Image

    width, height, mode_bytes = _IMAGE_HEAD.unpack_from(data)
    pixels_start = _IMAGE_HEAD.size + mode_bytes
    mode = str(data[_IMAGE_HEAD.size : pixels_start], "utf-8")
    return Image.frombytes(mode, (width, height), data[pixels_start:])


def image_file(data: bytes) -> Any:
    """Return the PIL image in an image file; its pixels are decoded when they are first used."""
    from PIL import Image

    return Image.open(io.BytesIO(data))


def items_of(data: bytes, start: int = 0) -> list[bytes]:
    """Return the items of a list of byte strings.

    The list is stored as the number of the items, the size of each, and then the items themselves.
    The numbers are u32. Raises ValueError if the list is not complete.

    Args:
        data: bytes that contain the list.
        start: offset of the list in `data`.
    """
    if len(data) < start + _U32.size:
        raise ValueError(f"{len(data)} bytes are too few for the number of items")
    (count,) = _U32.unpack_from(data, start)
    at = start + _U32.size * (1 + count)
    if at > len(data):
        raise ValueError(f"{len(data)} bytes are too few for the sizes of {count} items")
    items = []
    for number in range(count):
        (size_bytes,) = _U32.unpack_from(data, start + _U32.size * (1 + number))
        if at + size_bytes > len(data):
            raise ValueError(f"item {number} ends after the {len(data)} bytes")
        items.append(data[at : at + size_bytes])
        at += size_bytes
    return items


def check_pillow() -> None:
    """Raise ConfigError unless Pillow is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as exn:
        raise missing_package_error("pillow", "decoding images") from exn


def check_numpy() -> None:
    """Raise ConfigError unless numpy is installed."""
    try:
        import numpy  # noqa: F401
    except ImportError as exn:
        raise missing_package_error("numpy", "decoding arrays") from exn


def pickled_error(encoding: str) -> UnsupportedShardError:
    """Return the error for pickled values, whose decoding would run code from the shard."""
    return UnsupportedShardError(
        f"its values are pickled ({encoding}), and reading them would run code from the shard",
        remedy="leave the column out by members=; or, if you trust the data, decode it yourself: "
        'decode={"NAME": "pickle"}',
    )


def unsupported_error(encoding: str, library: str) -> UnsupportedShardError:
    """Return the error for an encoding that is not supported, although `library` may decode it."""
    return UnsupportedShardError(
        f"its encoding {encoding!r} is not supported",
        remedy="leave the column out by members=, or take its bytes: "
        f'decode={{"NAME": "bytes"}}, and decode them with {library}',
    )
