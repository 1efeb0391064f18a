"""Values of cells in the tables that the cache keeps of parquet files, by encoding.

The process that converts a parquet file names the encoding of each column, and encodes values that
have no simple type (`tagged`); readers decode cells with `DECODERS`. Numbers are little-endian, as
in Arrow. A value that is neither a number, a bool, a text nor bytes is tagged: it is JSON, in which
an object with the single field `!` stands for a value of a type that JSON lacks, such as
`{"!": ["date", "2026-01-31"]}`.
"""

import base64
import json
import struct
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

from shardcache.formats.format import Decoder, RunDecoder
from shardcache.formats.plain_values import number_decoder, text

TEXT = "text"
# An empty encoding means that a cell's bytes are the value, so no decoder is looked up.
BYTES = ""
BOOL = "bool"
TAGGED = "tagged"

_TAG = "!"
# The codes of numbers in the module `struct`, by encoding.
_NUMBERS: Mapping[str, str] = {
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
NUMBERS = frozenset(_NUMBERS)
"""Encodings of numbers, by Arrow's names of their types."""


def tagged(value: Any) -> bytes:
    """Return a value as tagged JSON.

    The value may have JSON's types, bytes, and the types of `datetime` and `decimal`. Raises
    TypeError for other types.
    """
    return json.dumps(value, default=_tag, ensure_ascii=False, separators=(",", ":")).encode()


def _tag(value: object) -> dict[str, list[Any]]:
    """Return the object that stands for a value that JSON lacks. Raises TypeError."""
    form: list[Any]
    match value:
        case bytes():
            form = ["bytes", base64.b64encode(value).decode()]
        case datetime():
            form = ["datetime", value.isoformat()]
        case date():
            form = ["date", value.isoformat()]
        case time():
            form = ["time", value.isoformat()]
        case timedelta():
            form = ["timedelta", [value.days, value.seconds, value.microseconds]]
        case Decimal():
            form = ["decimal", str(value)]
        case _:
            raise TypeError(f"a value is of type {type(value).__name__}")
    return {_TAG: form}


def _untag(fields: dict[str, Any]) -> Any:
    """Return the value for which a tagged object stands; return other objects as they are."""
    if fields.keys() != {_TAG}:
        return fields
    kind, form = fields[_TAG]
    match kind:
        case "bytes":
            return base64.b64decode(form)
        case "datetime":
            return datetime.fromisoformat(form)
        case "date":
            return date.fromisoformat(form)
        case "time":
            return time.fromisoformat(form)
        case "timedelta":
            return timedelta(*form)
        case "decimal":
            return Decimal(form)
        case _:
            raise ValueError(f"an unknown type {kind!r}")


def _bool(cell: bytes) -> bool:
    return cell != b"\0"


def _untagged(cell: bytes) -> Any:
    """Return the value of a cell in tagged JSON."""
    return json.loads(cell, object_hook=_untag)


DECODERS: Mapping[str, Decoder] = {
    TEXT: text,
    BOOL: _bool,
    TAGGED: _untagged,
    **{name: number_decoder(code) for name, code in _NUMBERS.items()},
}
"""The decoder of each encoding, except that of bytes, which need no decoding."""


# Decoders of consecutive cells of one column, as `RunDecoder` describes them. `cells` has the bytes
# of all these cells. `begin` is the offset in the shard of the first of these bytes, and `ends` has
# the offset in the shard at which each cell ends.


def _texts(cells: bytes, begin: int, ends: memoryview) -> list[str]:
    """Return consecutive texts; a `RunDecoder`."""
    borders = [0, *[end - begin for end in ends.tolist()]]
    if borders != sorted(borders):
        raise ValueError("a text that ends before it begins")
    joined = text(cells)
    # In ASCII, each byte is a character, so the offsets of bytes are those of characters.
    if joined.isascii():
        return [joined[start:stop] for start, stop in pairwise(borders)]
    return [text(cells[start:stop]) for start, stop in pairwise(borders)]


def _run_decoder(code: str) -> RunDecoder:
    """Return the `RunDecoder` of numbers with this code in `struct`."""

    def numbers(cells: bytes, begin: int, ends: memoryview) -> tuple[Any, ...]:
        return struct.unpack(f"<{len(ends)}{code}", cells)

    return numbers


RUN_DECODERS: Mapping[str, RunDecoder] = {
    TEXT: _texts,
    BOOL: _run_decoder("?"),
    **{name: _run_decoder(code) for name, code in _NUMBERS.items()},
}
"""The `RunDecoder` of each encoding for which decoding many cells at once is faster."""
