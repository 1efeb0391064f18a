"""Validation of client messages: every field that is used has the type that the protocol defines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from shardcache.errors import ProtocolError
from shardcache.protocol import ShardRef

T = TypeVar("T")

# The largest integer that SQLite and the kernel accept; JSON can hold sums of such numbers.
_MOST = 2**63 - 1
_COLUMNS = 4


def parse(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON message; bytes are UTF-8. Raises ProtocolError."""
    try:
        message = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as exn:
        raise ProtocolError(f"the message is not JSON: {exn}") from None
    if not isinstance(message, dict):
        raise ProtocolError("the message is not a JSON object")
    return message


def take(message: dict[str, Any], field: str, kind: type[T]) -> T:
    """Return a field. Raises ProtocolError if it is missing, of another type, or out of range."""
    value = message.get(field)
    if type(value) is not kind or not _is_sound(value):
        raise ProtocolError(f"{str(message.get('type', 'message'))[:100]!r} needs {field!r}: {kind.__name__}")
    return value


def _is_sound(value: object) -> bool:
    if type(value) is bool:
        return True
    return _is_count(value) if isinstance(value, int) else not isinstance(value, str) or _is_text(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_text(value: str) -> bool:
    """Return True if the text can be encoded: JSON may contain half a surrogate pair."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def take_strings(message: dict[str, Any], field: str) -> list[str]:
    """Return a field that is a list of strings. Raises ProtocolError."""
    values: list[Any] = take(message, field, list)
    if not all(isinstance(value, str) for value in values):
        raise ProtocolError(f"{field!r} must be a list of strings")
    return values


def shard_of(row: object) -> ShardRef:
    """Convert a row of a plan to a shard. Raises ProtocolError. A plan may have millions of rows: kept fast."""
    if type(row) is list and len(row) == _COLUMNS:
        url, version, size_bytes, samples = row
        if (
            type(url) is str
            and (url.isascii() or _is_text(url))
            and (version is None or (type(version) is str and _is_text(version)))
            and (size_bytes is None or _is_count(size_bytes))
            and (samples is None or _is_count(samples))
        ):
            return ShardRef(url, version, size_bytes, samples)
    raise ProtocolError("a shard must be [url, version, size_bytes, samples]")


def check_indices(values: Sequence[object], count: int) -> None:
    """Raise ProtocolError unless all values are indices into a list of length `count`."""
    if not all(type(value) is int and 0 <= value < count for value in values):
        raise ProtocolError(f"a plan's indices must lie between 0 and {count - 1}")
