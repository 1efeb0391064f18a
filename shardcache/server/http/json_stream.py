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
    parts: list[str] = []  # joined once: each copy of a long message takes milliseconds

    def write(piece: Sequence[object]) -> None:
        parts.extend((_dumps(piece)[1:-1], ","))

    for name, value in message.items():
        parts += ("," if parts else "{", _dumps(name), ":")
        if not value or not isinstance(value, list):
            parts.append(_dumps(value))
            continue
        parts.append("[")
        await turns.take(value, write)
        parts[-1] = "]"
    return "".join((*parts, "}"))
