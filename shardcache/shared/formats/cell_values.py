"""Values of cells in the tables that the cache makes of parquet files, by encoding.

The process that converts a parquet file names the encoding of each column; readers decode the
column's cells with `DECODERS`. Numbers are little-endian, as in Arrow.

Only numbers, bools, texts and bytes have encodings of their own. Any other value is tagged JSON, in
which an object with the single field `!` stands for a value of a type that JSON lacks. For a date,
it is `{"!": ["date", "2026-01-31"]}`.
"""

import base64
import json
import struct
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

from shardcache.shared.formats.format import Decoder, RunDecoder
from shardcache.shared.formats.plain_values import number_decoder, text

# The encodings besides those of numbers. Cells of bytes need no decoder.
TEXT = "text"
BYTES = ""
BOOL = "bool"
TAGGED = "tagged"

_TAG = "!"
# The code in the module `struct` of each encoding of numbers.
_NUMBER_CODES: Mapping[str, str] = {
    "int8": "b",
    "int16": "h",
    "int32": "l",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "L",
    "uint64": "Q",
    "halffloat": "e",
    "float": "f",
    "double": "d",
}
NUMBERS = frozenset(_NUMBER_CODES)
"""Encodings of numbers, by Arrow's names of their types."""


def tagged(value: Any) -> bytes:
    """Return a value as tagged JSON.

    The value may have JSON's types, bytes, and the types of `datetime` and `decimal`. Raises
    TypeError for other types.
    """
    return json.dumps(value, default=_tag, ensure_ascii=False, separators=(",", ":")).encode()


def _tag(value: object) -> dict[str, list[Any]]:
    """Return the object that stands for a value that JSON lacks. Raises TypeError."""
    tagged_value: list[Any]  # the name of the type, and the value in JSON
    match value:
        case bytes():
            tagged_value = ["bytes", base64.b64encode(value).decode()]
        case datetime():  # before `date`, of which it is a subclass
            tagged_value = ["datetime", value.isoformat()]
        case date():
            tagged_value = ["date", value.isoformat()]
        case time():
            tagged_value = ["time", value.isoformat()]
        case timedelta():
            tagged_value = ["timedelta", [value.days, value.seconds, value.microseconds]]
        case Decimal():
            tagged_value = ["decimal", str(value)]
        case _:
            raise TypeError(f"a value is of type {type(value).__name__}")
    return {_TAG: tagged_value}


def _untag(fields: dict[str, Any]) -> Any:
    """Return the value for which a tagged object stands; return other objects as they are."""
    if fields.keys() != {_TAG}:
        return fields
    type_name, value = fields[_TAG]
    match type_name:
        case "bytes":
            return base64.b64decode(value)
        case "datetime":
            return datetime.fromisoformat(value)
        case "date":
            return date.fromisoformat(value)
        case "time":
            return time.fromisoformat(value)
        case "timedelta":
            return timedelta(*value)
        case "decimal":
            return Decimal(value)
        case _:
            raise ValueError(f"an unknown type {type_name!r}")


def _bool(cell: bytes) -> bool:
    return cell != b"\0"


def _untagged(cell: bytes) -> Any:
    """Return the value of a cell in tagged JSON."""
    return json.loads(cell, object_hook=_untag)


DECODERS: Mapping[str, Decoder] = {
    TEXT: text,
    BOOL: _bool,
    TAGGED: _untagged,
    **{encoding: number_decoder(code) for encoding, code in _NUMBER_CODES.items()},
}
"""The decoder of each encoding, except that of bytes, which need no decoding."""


def _texts(cells: bytes, begin: int, ends: memoryview) -> list[str]:
    """Return consecutive texts; a `RunDecoder`."""
    # The offsets in `cells` at which a text ends and the next one begins.
    borders = [0, *[end - begin for end in ends.tolist()]]
    if borders != sorted(borders):
        raise ValueError("a text that ends before it begins")
    joined = text(cells)
    # In ASCII, each byte is a character, so the offsets of bytes are those of characters.
    if joined.isascii():
        return [joined[start:stop] for start, stop in pairwise(borders)]
    return [text(cells[start:stop]) for start, stop in pairwise(borders)]


def _numbers_decoder(code: str) -> RunDecoder:
    """Return the `RunDecoder` of numbers with this code in `struct`."""

    def numbers(cells: bytes, begin: int, ends: memoryview) -> tuple[Any, ...]:
        return struct.unpack(f"<{len(ends)}{code}", cells)

    return numbers


RUN_DECODERS: Mapping[str, RunDecoder] = {
    TEXT: _texts,
    BOOL: _numbers_decoder("?"),
    **{encoding: _numbers_decoder(code) for encoding, code in _NUMBER_CODES.items()},
}
"""The `RunDecoder` of each encoding for which decoding many cells at once is faster."""
