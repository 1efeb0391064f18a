"""Checking what clients send: every field that is used has the type that the protocol gives it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from shardcache.errors import ProtocolError
from shardcache.protocol import ShardRef

T = TypeVar("T")

# Sums of such numbers stay such as JSON can hold, and SQLite and the kernel take each.
_MOST = 2**63 - 1
_COLUMNS = 4


def parse(text: str | bytes) -> dict[str, Any]:
    """Return a message, whose bytes are UTF-8. Raises ProtocolError."""
    try:
        message = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as exn:
        raise ProtocolError(f"a message is no JSON: {exn}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a message is no JSON object")
    return message


def take(message: dict[str, Any], field: str, kind: type[T]) -> T:
    """Return a field. Raises ProtocolError where it is missing, of another type, or no sound value of that type."""
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
    """Whether it can be written down: JSON may hold half a character."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def take_strings(message: dict[str, Any], field: str) -> list[str]:
    """Return a list of strings."""
    values: list[Any] = take(message, field, list)
    if not all(isinstance(value, str) for value in values):
        raise ProtocolError(f"{field!r} must hold strings")
    return values


def shard_of(row: object) -> ShardRef:
    """Return the shard that a row of a plan is. Raises ProtocolError. There may be millions: no detours."""
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
    raise ProtocolError("a shard is [url, version, size_bytes, samples]")


def check_indices(values: Sequence[object], count: int) -> None:
    """Raise ProtocolError unless all of them are indices into a list of so many."""
    if not all(type(value) is int and 0 <= value < count for value in values):
        raise ProtocolError(f"a plan's indices lie between 0 and {count - 1}")
