"""Values that several formats store alike."""

import io
from collections.abc import Callable
from struct import Struct
from typing import Any

from shardcache.errors import UnsupportedShardError
from shardcache.formats.format import needs_package

_U32 = Struct("<I")
_PIL_HEAD = Struct("<3I")  # width, height, bytes of the mode's name


def text(data: bytes) -> str:
    """Return UTF-8 text."""
    return str(data, "utf-8")


def number_decoder(code: str) -> Callable[[bytes], Any]:
    """Return the decoder of one number, by its code in `struct`."""
    packed = Struct("<" + code)

    def number(data: bytes) -> Any:
        return packed.unpack(data)[0]

    return number


def raw_image(data: bytes) -> Any:
    """Return the PIL image that is stored as its size, its mode and its pixels."""
    from PIL import Image

    width, height, mode_bytes = _PIL_HEAD.unpack_from(data)
    pixels_start = _PIL_HEAD.size + mode_bytes
    mode = str(data[_PIL_HEAD.size : pixels_start], "utf-8")
    return Image.frombytes(mode, (width, height), data[pixels_start:])


def image_file(data: bytes) -> Any:
    """Return the PIL image in a file, whose pixels are decoded when they are first used."""
    from PIL import Image

    return Image.open(io.BytesIO(data))


def items_of(data: bytes, start: int = 0) -> list[bytes]:
    """Return byte strings that follow their number and their sizes, all u32, from `start` on.

    Raises ValueError if they are not all there.
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
    """Raise ConfigError unless images can be decoded."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as exn:
        raise needs_package("pillow", "decoding images") from exn


def check_numpy() -> None:
    """Raise ConfigError unless arrays can be made."""
    try:
        import numpy  # noqa: F401
    except ImportError as exn:
        raise needs_package("numpy", "decoding arrays") from exn


def pickled(encoding: str) -> UnsupportedShardError:
    """Return the error for values that would run code from the shard."""
    return UnsupportedShardError(
        f"its values are pickled ({encoding}), and reading them would run code from the shard",
        remedy="leave the column out by members=; or, if you trust the data, decode it yourself: "
        'decode={"NAME": "pickle"}',
    )


def unknown(encoding: str, library: str) -> UnsupportedShardError:
    """Return the error for an encoding that is not supported."""
    return UnsupportedShardError(
        f"its encoding {encoding!r} is not supported",
        remedy="leave the column out by members=, or take its bytes: "
        f'decode={{"NAME": "bytes"}}, and decode them with {library}',
    )
