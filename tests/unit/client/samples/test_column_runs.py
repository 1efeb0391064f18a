"""Samples of a parquet file, which are decoded column by column: the same as one by one."""

import io
from array import array
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardcache.errors import CorruptShardError, DecodeError, SampleError
from shardcache.shared.formats.arrow.parquet_file import PARQUET
from shardcache.shared.formats.arrow.parquet_program import copy
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.tarindex import tables
from shardcache_client.reading.leased.shards import MappedShard, ShardPlace
from shardcache_client.samples.sample_view import WHOLE, View

URL = "s3://bucket/train.parquet"
COUNT = 1000


def row_of(number: int) -> dict[str, Any]:
    return {
        "int": number - 500,
        "float": number / 3,
        "bool": number % 3 == 0,
        "text": f"text {number}",
        "accents": "é" * (number % 4),
        "bytes": bytes([number % 256]) * (number % 5),
        "list": [number, None],
    }


def mapped(
    path: Path,
    rows: list[dict[str, Any]],
    view: View = WHOLE,
    forge: Callable[[tables.Samples], object] = lambda samples: None,
) -> MappedShard:
    """Return a file of rows in the form in which it is cached, in row groups of 300.

    `forge` changes its index before it is written.
    """
    parquet = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), parquet, row_group_size=300)
    stream = io.BytesIO()
    copy(parquet, stream)
    path.write_bytes(stream.getvalue())
    samples = PARQUET.index(path, URL, IndexOptions())
    forge(samples)
    header = {
        "size_bytes": path.stat().st_size,
        "samples": len(samples),
        "content": PARQUET.name,
        "encodings": samples.encodings,
    }
    sidecar = path.with_suffix(".idx")
    tables.write(sidecar, header, samples)
    return MappedShard(ShardPlace(path, sidecar), URL, view=view)


def test_samples_in_order_are_those_by_number(tmp_path: Path) -> None:
    """The fields have the same order and types, and absent values are not made up."""
    rows = [row_of(number) for number in range(COUNT)]
    rows[7]["text"] = rows[500]["int"] = rows[999]["list"] = None
    expected = []
    for number, row in enumerate(rows):
        fields = {name: value for name, value in row.items() if value is not None}
        expected.append({"__key__": f"{number:09d}", "__url__": URL} | fields)
    with closing(mapped(tmp_path / "a.arrow", rows)) as shard:
        in_order = list(shard.samples())
        by_number = list(map(shard.cutter(), range(COUNT)))
        assert list(shard.samples(290, 310)) == expected[290:310]
    assert in_order == by_number == expected
    assert [list(sample) for sample in in_order] == [list(sample) for sample in expected]
    types = [[type(value) for value in sample.values()] for sample in in_order]
    assert types == [[type(value) for value in sample.values()] for sample in expected]


def test_choice_of_columns_holds(tmp_path: Path) -> None:
    """Columns that are not read, and those of which the bytes are wanted."""
    rows = [row_of(number) for number in range(COUNT)]
    view = View(
        reads=lambda name: name in ("x.int", "x.text"),
        decodes=lambda name: name == "x.text",
        prefix="x.",
    )
    with closing(mapped(tmp_path / "a.arrow", rows, view)) as shard:
        found = [(sample["x.int"], sample["x.text"]) for sample in shard.samples()]
        assert set(map(len, shard.samples())) == {4}
    assert found == [(row["int"], row["text"].encode()) for row in rows]


def test_bad_sample_among_others_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Samples before an invalid key or a text damaged in the cache are read."""
    rows = [row_of(number) | {"__key__": f"key {number}"} for number in range(COUNT)]
    rows[150]["__key__"] = ""
    path = tmp_path / "a.arrow"
    with closing(mapped(path, rows)) as shard:
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(b"text 30text 31"))
            file.write(b"\xff")
        samples = shard.samples()
        assert [next(samples)["__key__"] for _ in range(30)] == [
            f"key {number}" for number in range(30)
        ]
        with pytest.raises(DecodeError, match="'key 30': the column 'text'"):
            next(samples)
        with pytest.raises(SampleError, match="reserved"):
            list(shard.samples(31))
        assert len(list(shard.samples(151))) == COUNT - 151


@pytest.mark.parametrize("column", range(7))
@pytest.mark.parametrize(
    ("table", "row", "value"),
    [
        pytest.param("ends", 0, 1 << 40, id="end beyond the shard"),
        pytest.param("ends", COUNT - 1, 1 << 40, id="end of the last beyond the shard"),
        pytest.param("starts", 290, 1 << 40, id="start beyond the shard"),
        pytest.param("starts", 300, (1 << 64) - 1, id="start without a place in any file"),
        pytest.param("extension_ids", 500, 7, id="unknown column"),
    ],
)
def test_forged_places_of_values_are_damage(
    tmp_path: Path, table: str, row: int, value: int, column: int
) -> None:
    """They lead nobody outside of the shard, in order or by number."""

    def forge(samples: tables.Samples) -> None:
        numbers: array[int] = getattr(samples, table)
        numbers[7 * row + column] = value

    rows = [row_of(number) for number in range(COUNT)]
    with closing(mapped(tmp_path / "a.arrow", rows, forge=forge)) as shard:
        with pytest.raises(CorruptShardError, match="contradict"):
            list(shard.samples())
        with pytest.raises(CorruptShardError, match="contradict"):
            shard.cutter()
        with pytest.raises(CorruptShardError, match="contradict"):
            shard.column_spans(range(COUNT))


@pytest.mark.parametrize("column", range(7))
def test_first_value_that_ends_before_its_start_is_damage(tmp_path: Path, column: int) -> None:
    """Though the next value begins at that end: neither is taken for another value."""

    def forge(samples: tables.Samples) -> None:
        end = samples.starts[column] - 1
        samples.ends[column] = samples.starts[7 + column] = end

    rows = [row_of(number) for number in range(COUNT)]
    with (
        closing(mapped(tmp_path / "a.arrow", rows, forge=forge)) as shard,
        pytest.raises(CorruptShardError, match="contradict"),
    ):
        list(shard.samples())


def test_later_text_that_ends_before_its_start_is_damage(tmp_path: Path) -> None:
    """As other values are: it is not read as an empty text before a longer one."""
    row = 290
    column = 3

    def forge(samples: tables.Samples) -> None:
        samples.ends[7 * row + column] = samples.starts[7 * (row + 1) + column] = 0

    rows = [row_of(number) for number in range(COUNT)]
    with (
        closing(mapped(tmp_path / "a.arrow", rows, forge=forge)) as shard,
        pytest.raises(CorruptShardError, match="contradict"),
    ):
        list(shard.samples())
