"""Content of files that may be lists of shards, parsed unless it would take far too much memory."""

import json
from typing import Any

# The values of lists are at least this long on average, with their comma: the nulls of MDS' many
# columns, and the names of shards in lines. A file of shorter values is not a list, and would take
# tens of times its size once it is parsed.
_MIN_BYTES_PER_VALUE = 4


def parsed_json(data: bytes) -> Any:
    """Return what a file holds as JSON. Raises ValueError if it is none, or cannot be a list."""
    if data.count(b",") * _MIN_BYTES_PER_VALUE > len(data):
        raise ValueError("its values are too short to be shards")
    try:
        return json.loads(data)
    except RecursionError as exn:
        raise ValueError("it is nested too deeply") from exn


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without the blank ones; none if it cannot be a list."""
    if text.count("\n") * _MIN_BYTES_PER_VALUE > len(text):
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
