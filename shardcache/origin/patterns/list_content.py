"""Content of files that may be lists of shards, parsed unless that would take too much memory."""

import json
from typing import Any

# The values of a list have at least this length on average, with their commas or line ends. A file
# of shorter values is not a list of shards; parsed, it would take tens of times its size.
_MIN_BYTES_PER_VALUE = 4


def parsed_json(data: bytes) -> Any:
    """Return a file's content as JSON. Raises ValueError if it is not, or cannot be a list."""
    if data.count(b",") * _MIN_BYTES_PER_VALUE > len(data):
        raise ValueError("its values are too short to be shards")
    try:
        return json.loads(data)
    except RecursionError as exn:
        raise ValueError("it is nested too deeply") from exn


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without the blank ones; no lines if it cannot be a list."""
    if text.count("\n") * _MIN_BYTES_PER_VALUE > len(text):
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
