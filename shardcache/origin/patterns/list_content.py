"""Parsing of files that may be lists of shards, with limited memory.

`foreign_lists` and `index_files` call these functions. A file that cannot be a list of shards is
not parsed, because it could take tens of times its size in memory.
"""

import json
from typing import Any

# Minimum average length of the values of a list of shards, with their commas or line ends. The
# shorter the values, the more memory they take in relation to the file.
_MIN_BYTES_PER_VALUE = 4


def parsed_json(data: bytes) -> Any:
    """Return the parsed JSON of a file.

    Raises ValueError if the file is not JSON, or cannot be a list of shards.
    """
    if data.count(b",") * _MIN_BYTES_PER_VALUE > len(data):
        raise ValueError("its values are too short to be shards")
    try:
        return json.loads(data)
    except RecursionError as exn:
        raise ValueError("it is nested too deeply") from exn


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, except blank lines; none if it cannot be a list of shards."""
    if text.count("\n") * _MIN_BYTES_PER_VALUE > len(text):
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
