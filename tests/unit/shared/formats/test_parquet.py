"""Parquet files as they are cached: each cell as `to_pylist` gives it."""

import contextlib
import datetime
import io
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import CorruptShardError
from shardcache.shared.formats import cell_values
from shardcache.shared.formats.arrow.parquet_file import PARQUET
from shardcache.shared.formats.arrow.parquet_program import copy
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.tarindex.tables import Samples, fault_of, key_of

URL = "hf://datasets/some/set/train.parquet"

SCALARS: Mapping[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    pa.large_string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    pa.binary(): st.binary(max_size=9),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["a", "b"]),
    pa.timestamp("us", "UTC"): st.datetimes(
        datetime.datetime(1970, 1, 1),
        datetime.datetime(2200, 1, 1),
        timezones=st.just(datetime.UTC),
    ),
    pa.date32(): st.dates(),
    pa.duration("us"): st.timedeltas(datetime.timedelta(-9999), datetime.timedelta(9999)),
    pa.decimal128(9, 2): st.decimals(-10_000, 10_000, places=2),
    pa.list_(pa.int64()): st.lists(st.none() | st.integers(-9, 9), max_size=3),
    pa.list_(pa.struct({"x": pa.binary(), "!": pa.date32()})): st.lists(
        st.fixed_dictionaries({"x": st.binary(max_size=3), "!": st.dates()}), max_size=3
    ),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(0, 6))
    arrays = {}
    for number, type_ in enumerate(draw(st.lists(st.sampled_from(list(SCALARS)), max_size=4))):
        values = st.none() | SCALARS[type_] if draw(st.booleans()) else SCALARS[type_]
        column = draw(st.lists(values, min_size=rows, max_size=rows))
        arrays[f"column {number}"] = pa.array(column, type_)
    return pa.table(arrays)


def stream_of(path: Path, table: pa.Table, **options: Any) -> bytes:
    pq.write_table(table, path, **options)
    stream = io.BytesIO()
    copy(path, stream)
    return stream.getvalue()


def indexed(path: Path, data: bytes) -> Samples:
    path.write_bytes(data)
    return PARQUET.index(path, URL, IndexOptions())


def rows_of(samples: Samples, data: bytes) -> list[dict[str, Any]]:
    decoders = [PARQUET.decoder(encoding) for encoding in samples.encodings]
    found = []
    begin = 0
    for end in samples.member_ends:
        row = {}
        for member in range(begin, end):
            column = samples.extension_ids[member]
            cell = data[samples.starts[member] : samples.ends[member]]
            decode = decoders[column]
            row[samples.extensions[column]] = cell if decode is None else decode(cell)
        found.append(row)
        begin = end
    return found


def without_nulls(table: pa.Table) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if value is not None}
        for row in table.to_pylist()
    ]


@given(tables(), st.integers(1, 4))
def test_cells_are_those_of_pyarrow(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, group: int
) -> None:
    """Whatever the types, row groups and nulls, which are left out."""
    path = tmp_path_factory.mktemp("tables") / "a.parquet"
    data = stream_of(path, table, row_group_size=group)
    samples = indexed(path.with_suffix(".arrow"), data)
    assert rows_of(samples, data) == (without_nulls(table) if table.num_columns else [])


def test_times_of_a_zone_have_its_offset(tmp_path: Path) -> None:
    """The offset of summer or of winter, in place of the zone's name."""
    times = [datetime.datetime(2026, month, 1, tzinfo=datetime.UTC) for month in (1, 7)]
    data = stream_of(
        tmp_path / "a.parquet",
        pa.table({"at": pa.array(times, pa.timestamp("us", tz="Europe/Berlin"))}),
    )
    found = [row["at"] for row in rows_of(indexed(tmp_path / "a.arrow", data), data)]
    assert found == times
    assert [at.utcoffset() for at in found] == [datetime.timedelta(hours=hours) for hours in (1, 2)]


def test_images_are_their_bytes(tmp_path: Path) -> None:
    """As the Hub has them, a struct of bytes and path: the latter is a column of its own."""
    files = [{"bytes": b"jpeg", "path": "a.jpg"}, {"bytes": b"png", "path": None}, None]
    type_ = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    data = stream_of(tmp_path / "a.parquet", pa.table({"image": pa.array(files, type_)}))
    samples = indexed(tmp_path / "a.arrow", data)
    assert rows_of(samples, data) == [
        {"image": b"jpeg", "image.path": "a.jpg"},
        {"image": b"png"},
        {},
    ]


@pytest.mark.parametrize(
    ("keys", "key"), [(["n/1", None], "n/1"), ([7, None], "7"), (["é", ""], "é")]
)
def test_column_key_has_the_keys(tmp_path: Path, keys: list[Any], key: str) -> None:
    """A table that was made of tars has them, and their urls, which are left out."""
    table = pa.table({"__key__": keys, "__url__": ["a.tar", "a.tar"], "txt": ["a", "b"]})
    data = stream_of(tmp_path / "a.parquet", table)
    samples = indexed(tmp_path / "a.arrow", data)
    assert key_of(samples, 0) == key
    assert rows_of(samples, data) == [{"txt": "a"}, {}]
    assert "'__key__'" in (fault_of(samples, 1) or "")


def test_values_of_all_tagged_types_come_back() -> None:
    """Types that JSON lacks are named."""
    value = {
        "a": [b"\0\xff", Decimal("1.50"), datetime.date(2026, 1, 31), datetime.time(1, 2, 3, 4)],
        "b": {"c": datetime.timedelta(-1, 2, 3), "d": datetime.datetime(2026, 1, 31, 1, 2, 3, 4)},
    }
    decode = cell_values.DECODERS[cell_values.TAGGED]
    assert decode(cell_values.tagged(value)) == value


def test_stream_is_made_by_a_process(tmp_path: Path) -> None:
    """Its bytes are those of the program in this process."""
    expected = stream_of(tmp_path / "a.parquet", pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]}))
    with PARQUET.stored_copy(tmp_path / "a.parquet", URL) as stream:
        assert stream.read() == expected


def test_file_that_is_no_parquet_is_an_error(tmp_path: Path) -> None:
    """The error has pyarrow's words."""
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing PAR1")
    with (
        PARQUET.stored_copy(path, URL) as stream,
        pytest.raises(CorruptShardError, match=r"cannot be read: .*[Pp]arquet"),
    ):
        stream.read()


def test_stream_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    """Its index is not made."""
    data = stream_of(tmp_path / "a.parquet", pa.table({"a": [1, 2, 3]}))
    with pytest.raises(CorruptShardError, match="the table cannot be read"):
        indexed(tmp_path / "a.arrow", data[:-40])


@pytest.mark.slow
def test_small_file_that_decodes_to_gigabytes_is_refused(tmp_path: Path) -> None:
    """8 GiB in a batch of a kilobyte's file may not take the node's memory."""
    path = tmp_path / "a.parquet"
    repeated = pa.DictionaryArray.from_arrays(
        pa.array([0] * 512, pa.int32()), pa.array([bytes(16 << 20)])
    )
    pq.write_table(pa.table({"a": repeated}), path, compression="zstd", write_statistics=False)
    assert path.stat().st_size < 10_000
    with (
        PARQUET.stored_copy(path, URL) as stream,
        pytest.raises(CorruptShardError, match="take more memory than is allowed") as caught,
    ):
        stream.read()
    assert caught.value.url == URL


def test_compressed_buffers_are_refused(tmp_path: Path) -> None:
    """Cells have to be ranges of the file: a stream with others is not the program's."""
    table = pa.table({"a": ["x" * 1000] * 100})
    stream = io.BytesIO()
    with pa.ipc.new_stream(
        stream, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as out:
        out.write_table(table)
    with pytest.raises(CorruptShardError, match="its buffers are compressed"):
        indexed(tmp_path / "a.arrow", stream.getvalue())


@pytest.mark.slow
@given(st.data())
def test_cut_or_altered_file_is_an_error_or_has_sound_cells(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """No number in the file is trusted."""
    path = tmp_path_factory.mktemp("damaged") / "a.parquet"
    pq.write_table(pa.table({"a": [1, 2, 3], "b": ["x", "y", None], "c": [[1], [], [2]]}), path)
    found = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del found[data.draw(st.integers(0, len(found) - 1)) :]
    else:
        found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(found)
    stream = io.BytesIO()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, MemoryError):
        copy(path, stream)
        samples = indexed(path.with_suffix(".arrow"), stream.getvalue())
        assert max(samples.ends, default=0) <= len(stream.getvalue())
