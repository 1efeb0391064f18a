"""Rows of odd and damaged tables: the values of Python's readers, or a typed error."""

import bz2
import gzip
import io
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from shardcache.errors import MetadataError
from shardcache.shared.formats.zstd_library import zstd_library
from shardcache_client.tables.row_files import rows_of

zstd = zstd_library()

LINES = b"".join(b'{"k": "%d", "v": "%s"}\n' % (number, b"x" * number) for number in range(300))
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


def read(folder: Path, name: str, data: bytes) -> list[dict[str, Any]]:
    path = folder / name
    path.write_bytes(data)
    return list(rows_of(f"s3://bucket/{name}", path, None))


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_damage_of_each_compression_is_a_typed_error(tmp_path: Path, suffix: str) -> None:
    """At the beginning, in the middle, at the end, and where the file is cut off."""
    data = COMPRESSIONS[suffix](LINES)
    assert len(read(tmp_path, f"a.jsonl{suffix}", data)) == 300
    for place in (12, len(data) // 2, len(data) - 6):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        with pytest.raises(MetadataError, match="What to do: repair the file"):
            read(tmp_path, f"a.jsonl{suffix}", bytes(damaged))
    with pytest.raises(MetadataError):
        read(tmp_path, f"a.jsonl{suffix}", data[: len(data) // 2])


def test_json_lines_with_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    """And empty lines, and what is no number in JSON."""
    rows = read(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"k": "1"}\r\n\r\n{"k": "2", "v": NaN}\r\n')
    assert [row["k"] for row in rows] == ["1", "2"]
    assert math.isnan(rows[1]["v"])


def test_nested_line_is_a_typed_error(tmp_path: Path) -> None:
    """Deeper than Python's parser goes."""
    with pytest.raises(MetadataError, match="recursion"):
        read(tmp_path, "a.jsonl", b"[" * 200_000)


def test_csv_is_read_with_quotes_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    """A field may have the delimiter, quotes and line breaks."""
    rows = read(tmp_path, "a.csv", b'\xef\xbb\xbfk,v\r\n1,"a ""b"",\r\nc"\r\n')
    assert rows == [{"k": "1", "v": 'a "b",\r\nc'}]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"k,v,v\n1,2,3\n", "two columns have the name 'v'"),
        (b'k,v\n1,"a\n', "unexpected end of data"),
        (b"k,v\n1\n", "line 2 has another number of fields"),
        (b"k,v\n1," + bytes(200_000).replace(b"\0", b"x") + b"\n", "field larger than field limit"),
        (b"k,v\n1,\xff\n", "'utf-8' codec"),
    ],
)
def test_csv_that_would_lose_values_is_a_typed_error(
    tmp_path: Path, data: bytes, match: str
) -> None:
    """Nothing is guessed."""
    with pytest.raises(MetadataError, match=match):
        read(tmp_path, "a.csv", data)


@pytest.mark.parametrize("data", [b"", b"k,v\n"])
def test_table_without_rows_is_empty(tmp_path: Path, data: bytes) -> None:
    """With and without a header."""
    assert read(tmp_path, "a.csv", data) == []


def in_parquet(**columns: pyarrow.Array) -> bytes:
    data = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), data)
    return data.getvalue()


@pytest.mark.parametrize(
    ("type_", "number"),
    [(pyarrow.date32(), 2**31 - 1), (pyarrow.timestamp("us"), 2**62)],
    ids=["date", "time"],
)
def test_times_beyond_those_of_python_are_a_typed_error(
    tmp_path: Path, type_: pyarrow.DataType, number: int
) -> None:
    data = in_parquet(k=pyarrow.array(["a"]), v=pyarrow.array([number], type_))
    with pytest.raises(MetadataError, match="cannot be read to its end"):
        read(tmp_path, "a.parquet", data)


def test_parquet_with_two_columns_of_one_name_is_a_typed_error(tmp_path: Path) -> None:
    """One of them would be lost."""
    arrays = [pyarrow.array([value]) for value in ("a", 1, 2)]
    data = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["k", "v", "v"]), data)
    with pytest.raises(MetadataError, match="two columns have the name 'v'"):
        read(tmp_path, "a.parquet", data.getvalue())
