"""JSON serialization of the daemon's messages: a manifest of a million shards is written piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shardcache.cache.loop_turns import Turns
from shardcache.protocol import ShardRef

_dumps: Callable[[Any], str] = partial(json.dumps, separators=(",", ":"), default=ShardRef.to_json)


async def written(message: Mapping[str, Any], turns: Turns) -> str:
    """Return a message as JSON; shards become rows, and long lists take turns with other work on the event loop."""
    fields = [f"{_dumps(name)}:{await _value(value, turns)}" for name, value in message.items()]
    return "{" + ",".join(fields) + "}"


async def _value(value: object, turns: Turns) -> str:
    if not isinstance(value, list):
        return _dumps(value)
    pieces: list[str] = []

    def write(piece: Sequence[object]) -> None:
        pieces.append(_dumps(piece)[1:-1])

    await turns.take(value, write)
    return f"[{','.join(pieces)}]"
