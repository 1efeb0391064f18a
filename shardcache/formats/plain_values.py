"""Decoders of values that several formats store in the same way, and their common errors.

MDS and LitData (`chunks`) use most of them. numpy and Pillow are imported only when needed.
"""

import io
from collections.abc import Callable
from struct import Struct
from typing import Any

from shardcache.errors import UnsupportedShardError
from shardcache.formats.format import needs_package

_U32 = Struct("<I")
_PIL_HEAD = Struct("<3I")  # width, height, and length of the mode's name in bytes


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
    """Return the PIL image that is stored as size, mode and uncompressed pixels."""
    from PIL import Image

    width, height, mode_bytes = _PIL_HEAD.unpack_from(data)
    pixels_start = _PIL_HEAD.size + mode_bytes
    mode = str(data[_PIL_HEAD.size : pixels_start], "utf-8")
    return Image.frombytes(mode, (width, height), data[pixels_start:])


def image_file(data: bytes) -> Any:
    """Return the PIL image in an image file; its pixels are decoded when they are first used."""
    from PIL import Image

    return Image.open(io.BytesIO(data))


def items_of(data: bytes, start: int = 0) -> list[bytes]:
    """Return the byte strings of a list: their number, their sizes (all u32), then their bytes.

    Raises ValueError if the list is not complete.

    Args:
        data: bytes that contain the list.
        start: offset of the list in `data`.
    """
    if len(data) < start + _U32.size:
        raise ValueError(f"{len(data)} bytes hold no number of items")
    (count,) = _U32.unpack_from(data, start)
    at = start + _U32.size * (1 + count)
    if at > len(data):
        raise ValueError(f"{len(data)} bytes hold no sizes of {count} items")
    items = []
    for nth in range(count):
        (size_bytes,) = _U32.unpack_from(data, start + _U32.size * (1 + nth))
        if at + size_bytes > len(data):
            raise ValueError(f"item {nth} ends behind the {len(data)} bytes")
        items.append(data[at : at + size_bytes])
        at += size_bytes
    return items


def check_pillow() -> None:
    """Raise ConfigError unless Pillow is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as exn:
        raise needs_package("pillow", "decoding images") from exn


def check_numpy() -> None:
    """Raise ConfigError unless numpy is installed."""
    try:
        import numpy  # noqa: F401
    except ImportError as exn:
        raise needs_package("numpy", "decoding arrays") from exn


def pickled(encoding: str) -> UnsupportedShardError:
    """Return the error for pickled values, since decoding them would run code from the shard."""
    return UnsupportedShardError(
        f"its values are pickled ({encoding}), and reading them would run code from the shard",
        remedy="leave the column out by members=; or, if you trust the data, decode it yourself: "
        'decode={"NAME": "pickle"}',
    )


def unknown(encoding: str, library: str) -> UnsupportedShardError:
    """Return the error for an encoding that is not supported, although `library` may decode it."""
    return UnsupportedShardError(
        f"its encoding {encoding!r} is not supported",
        remedy="leave the column out by members=, or take its bytes: "
        f'decode={{"NAME": "bytes"}}, and decode them with {library}',
    )
