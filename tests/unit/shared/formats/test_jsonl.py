"""JSON Lines: the fields of each line are columns, with the values that `json` gives."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import UnsupportedShardError
from shardcache.shared.formats import jsonl
from shardcache.shared.formats.cells import MAX_NAMES_BYTES, CellTable
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.tarindex.tables import Samples, fault_of, key_of

URL = "s3://bucket/train.jsonl"

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS.filter(lambda name: not name.startswith("__")), VALUES, max_size=5)


def decoded(samples: Samples, data: bytes) -> list[dict[str, Any] | None]:
    """Return the fields of each sample; None for one with a fault."""
    decoders = [jsonl.JSON_LINES.decoder(encoding) for encoding in samples.encodings]
    rows: list[dict[str, Any] | None] = []
    begin = 0
    for number, end in enumerate(samples.member_ends):
        row = {}
        for member in range(begin, end):
            cell = data[samples.starts[member] : samples.ends[member]]
            column = samples.extension_ids[member]
            decode = decoders[column]
            assert decode is not None
            row[samples.extensions[column]] = decode(cell)
        rows.append(None if number in samples.faults else row)
        begin = end
    return rows


def indexed(path: Path, data: bytes) -> Samples:
    path.write_bytes(data)
    return jsonl.JSON_LINES.index(path, URL, IndexOptions())


@given(
    rows=st.lists(OBJECTS, max_size=8),
    escapes=st.booleans(),
    indent=st.sampled_from([(",", ":"), (", ", ": "), (" , \t", " :\r")]),
    end=st.sampled_from(["\n", "\r\n", "\n\n", " \n"]),
)
def test_values_are_those_of_json(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    escapes: bool,
    indent: tuple[str, str],
    end: str,
) -> None:
    """Whatever the fields, and however they are written: blanks, escapes, ends of lines."""
    lines = [json.dumps(row, ensure_ascii=escapes, separators=indent) + end for row in rows]
    data = "".join(lines).encode()
    samples = indexed(tmp_path_factory.mktemp("lines") / "a.jsonl", data)
    assert decoded(samples, data) == rows


def test_keys_are_numbers_of_samples(tmp_path: Path) -> None:
    """Empty lines are not counted, nor needs the last line an end."""
    samples = indexed(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n \r\n{}\n{"a": 3}')
    assert [key_of(samples, number) for number in range(3)] == [
        "000000000",
        "000000001",
        "000000002",
    ]


def test_field_key_is_the_key(tmp_path: Path) -> None:
    """So that lines can be joined with the samples of tars; neither it nor a url is a column."""
    data = b'{"a": 1, "__url__": "a.tar", "__key__": "cl\\u00e9/1"}\n'
    samples = indexed(tmp_path / "a.jsonl", data)
    assert key_of(samples, 0) == "clé/1"
    assert decoded(samples, data) == [{"a": 1}]


def test_last_of_equal_fields_counts(tmp_path: Path) -> None:
    """As in `json.loads`, also where the names are written differently."""
    data = b'{"\xc3\xa9": 1, "b": 2, "\\u00e9": 3}'
    assert decoded(indexed(tmp_path / "a.jsonl", data), data) == [json.loads(data)]


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"1",
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a": 1,}',
        b'{"a": 1} {}',
        b'{"a": 1 "b": 2}',
        b"{a: 1}",
        b'{"a": "\xff"}',
        b'{"\\ud800": 1}',
        b'{"a": tru}',
        b'{"a": "b}',
        b'{"a": ' + b"[" * 100_000 + b"}",
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
def test_bad_line_is_a_fault_of_its_sample(tmp_path: Path, line: bytes) -> None:
    """Those before and after it are read."""
    data = b'{"a": 1}\n' + line + b'\n{"a": 2}\n'
    samples = indexed(tmp_path / "a.jsonl", data)
    assert decoded(samples, data) == [{"a": 1}, None, {"a": 2}]
    fault = fault_of(samples, 1)
    assert fault == "the line of the sample '000000001' is not a JSON object in UTF-8"


@pytest.mark.parametrize(
    "field", ['"__bad__": "a"', '"__key__": 1', '"__key__": ""', '"__key__": "\\ud800"']
)
def test_reserved_field_is_a_fault_of_its_sample(tmp_path: Path, field: str) -> None:
    """No field replaces what every sample has."""
    samples = indexed(tmp_path / "a.jsonl", b'{"b": 1, %s}' % field.encode())
    assert "reserved" in (fault_of(samples, 0) or "")


def test_samples_and_cells_are_limited() -> None:
    """A shard of nothing but short lines would need many times its size in memory."""
    table = CellTable(URL, max_samples=2, max_cells=3)
    table.add([(0, (0, 1))])
    table.add([(0, (1, 2)), (1, (2, 3))])
    with pytest.raises(UnsupportedShardError, match="more than 2 samples"):
        table.add([])
    table = CellTable(URL, max_columns=1)
    assert table.column("a") == table.column("a")
    with pytest.raises(UnsupportedShardError, match="more than 1 columns"):
        table.column("b")
    table = CellTable(URL)
    assert [table.column(letter * (MAX_NAMES_BYTES // 2)) for letter in "aba"] == [0, 1, 0]
    with pytest.raises(UnsupportedShardError, match="bytes of column names"):
        table.column("c")
    table = CellTable(URL, max_samples=2, max_cells=3)
    table.add([])
    with pytest.raises(UnsupportedShardError, match="more than 3 values"):
        table.add([(0, (0, 1)), (1, (1, 2)), (2, (2, 3)), (3, (3, 4))])
