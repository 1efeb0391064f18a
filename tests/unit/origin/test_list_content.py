"""Files that may be lists of shards are parsed, unless they take far too much memory."""

import json

import pytest

from shardcache.origin.patterns.list_content import lines_of, parsed_json

COLUMNS = 40
SHARD = {
    "column_names": [f"c{number}" for number in range(COLUMNS)],
    "column_encodings": ["int"] * COLUMNS,
    "column_sizes": [None] * COLUMNS,
    "raw_data": {"basename": "shard.00000.mds", "bytes": 1, "hashes": {}},
    "samples": 1,
}


@pytest.mark.parametrize(
    "listed",
    [
        {"version": 2, "shards": [SHARD] * 1_000},
        {f"{number}.tar": 1 for number in range(10)},
        ["0.tar"],
    ],
    ids=["mds", "counts", "names"],
)
def test_lists_of_short_values_are_parsed(listed: object) -> None:
    """Many columns or short names pass, even without spaces or after a byte order mark."""
    assert parsed_json(json.dumps(listed, separators=(",", ":")).encode("utf-8-sig")) == listed


@pytest.mark.parametrize(
    "data", [b"[" + b"[]," * 1_000 + b"[]]", b"[" + b"1," * 1_000 + b"1]", b"[" * 100_000]
)
def test_files_of_brackets_are_no_lists(data: bytes) -> None:
    """They would take tens of times their size."""
    with pytest.raises(ValueError, match=r"too short|nested|Expecting"):
        parsed_json(data)


def test_lines_of_short_names_are_lines() -> None:
    """A text of line breaks alone has none."""
    assert lines_of("0.tar\n1.tar\n\n2.tar\n") == ["0.tar", "1.tar", "2.tar"]
    assert lines_of("\n" * 1_000) == []
