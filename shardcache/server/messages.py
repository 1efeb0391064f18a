"""Checking what clients send: every field that is used has the type that the protocol gives it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from shardcache.errors import ProtocolError
from shardcache.protocol import ShardRef

T = TypeVar("T")


def parse(text: str) -> dict[str, Any]:
    """Return a message. Raises ProtocolError."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as exn:
        raise ProtocolError(f"a message is no JSON: {exn}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a message is no JSON object")
    return message


def take(message: dict[str, Any], field: str, kind: type[T]) -> T:
    """Return a field. Raises ProtocolError where it is missing or of another type."""
    value = message.get(field)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProtocolError(f"{message.get('type', 'message')!r} needs {field!r}: {kind.__name__}")
    return value


def take_strings(message: dict[str, Any], field: str) -> list[str]:
    """Return a list of strings."""
    values: list[Any] = take(message, field, list)
    if not all(isinstance(value, str) for value in values):
        raise ProtocolError(f"{field!r} must hold strings")
    return values


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a plan.

    Attributes:
        shards: what it adds to the plan's table.
        order: positions, as indices into the table as it then is.
    """

    shards: list[ShardRef]
    order: list[int]

    @classmethod
    def from_message(cls, message: dict[str, Any], known_shards: int) -> Piece:
        """Build from a `plan` or `extend` message to a plan that has so many shards. Raises ProtocolError."""
        shards = [_shard(row) for row in take(message, "shards", list)]
        return cls(shards, _indices(take(message, "order", list), known_shards + len(shards)))


def _shard(row: object) -> ShardRef:
    match row:
        case [str(url), str() | None as version, int() | None as size_bytes, int() | None as samples]:
            return ShardRef(url, version, size_bytes, samples)
    raise ProtocolError("a shard is [url, version, size_bytes, samples]")


def _indices(values: list[Any], count: int) -> list[int]:
    if not all(type(value) is int and 0 <= value < count for value in values):
        raise ProtocolError(f"a plan's indices lie between 0 and {count - 1}")
    return values
