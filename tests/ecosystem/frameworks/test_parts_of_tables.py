"""Readers of tables and arrays over `shardcache::` urls fetch only the parts that they read."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest

from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.programs.daemon import Daemon, eventually
from support.stores.buckets import Bucket
from support.stores.faulty_proxy import FaultyProxy

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

# As the entry point of a wheel does.
fsspec.register_implementation("shardcache", ShardcacheFileSystem, clobber=True)

PART_BYTES = 64 * 1024
GROUPS = 8
GROUP_ROWS = 50_000
COLUMN_PARTS = 8 * GROUP_ROWS / PART_BYTES  # of one row group
# Of the table's end; the ends of a column may lie in parts of its neighbours.
FOOTER_PARTS = ENDS_PARTS = 2

Read = Callable[[Any, Any, str], float]


@pytest.fixture(scope="module")
def table() -> bytes:
    """A parquet file of five columns of random numbers, and one of row groups' numbers."""
    numbers = numpy.random.default_rng(3)
    columns = {name: numbers.random(GROUPS * GROUP_ROWS) for name in "abcde"}
    columns["group"] = numpy.repeat(numpy.arange(float(GROUPS)), GROUP_ROWS)
    file = io.BytesIO()
    how: dict[str, Any] = {
        "compression": "none",
        "use_dictionary": False,
        "row_group_size": GROUP_ROWS,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), file, **how)
    return file.getvalue()


@contextmanager
def counted(bucket: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Give this process a new cache; yield a list that gets the number of parts sent."""
    parts: list[float] = []
    with FaultyProxy(bucket.server.endpoint_url) as network:
        flags = ("--range-part-size", str(PART_BYTES))
        with Daemon(folder, *flags, env=network.env(bucket.env())) as node:
            monkeypatch.setenv("SHARDCACHE_SOCKET", str(node.socket))
            ShardcacheFileSystem.clear_instance_cache()
            yield parts
            # The daemon counts what came; each counts a little after it.
            eventually(lambda: node.status()["counters"]["origin_bytes"] == network.sent_bytes)
            parts.append(network.sent_bytes / PART_BYTES)


def of_duckdb(duckdb: Any, files: Any, url: str) -> float:
    database = duckdb.connect()
    database.register_filesystem(files)
    ((found,),) = database.sql(f'select sum("group") from \'{url}\' where "group" = 5').fetchall()
    return float(found)


def of_polars(polars: Any, files: Any, url: str) -> float:
    """Arrow's dataset reads it lazily, where polars itself reads all of a foreign file."""
    table = polars.scan_pyarrow_dataset(
        pyarrow.dataset.dataset(url, filesystem=files, format="parquet")
    )
    return float(table.filter(polars.col("group") == 5).select("group").collect()["group"].sum())


def of_pandas(pandas: Any, _files: Any, url: str) -> float:
    rows = pandas.read_parquet(url, columns=["group"], filters=[("group", "==", 5)])
    return float(rows["group"].sum())


def of_arrow(arrow: Any, files: Any, url: str) -> float:
    table = arrow.dataset.dataset(url, filesystem=files, format="parquet")
    return float(
        pyarrow.compute.sum(
            table.to_table(columns=["group"], filter=arrow.dataset.field("group") == 5)["group"]
        ).as_py()
    )


@pytest.mark.parametrize(
    ("package", "read"),
    [("duckdb", of_duckdb), ("polars", of_polars), ("pandas", of_pandas), ("pyarrow", of_arrow)],
)
def test_rows_of_one_group_cost_the_parts_of_their_column(
    seaweedfs: Bucket,
    table: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    read: Read,
) -> None:
    """The footer says where it lies; of the other columns and groups nothing is fetched."""
    library = pytest.importorskip(package)
    url = f"shardcache://{seaweedfs.put('tables/t.parquet', table)}"
    with counted(seaweedfs, tmp_path, monkeypatch) as parts:
        assert read(library, fsspec.filesystem("shardcache"), url) == 5 * GROUP_ROWS
    assert parts[0] <= FOOTER_PARTS + COLUMN_PARTS + ENDS_PARTS


def test_duckdb_counts_rows_by_the_footers_of_a_glob(
    seaweedfs: Bucket, table: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each file, its end."""
    duckdb = pytest.importorskip("duckdb", minversion="1")
    for name in ("a", "b", "c"):
        seaweedfs.put(f"tables/{name}.parquet", table)
    with counted(seaweedfs, tmp_path, monkeypatch) as parts:
        database = duckdb.connect()
        database.register_filesystem(fsspec.filesystem("shardcache"))
        query = f"select count(*) from 'shardcache://{seaweedfs.url}/tables/*.parquet'"
        assert database.sql(query).fetchall() == [(3 * GROUPS * GROUP_ROWS,)]
    assert parts[0] <= 3 * FOOTER_PARTS


def test_chunk_of_a_zarr_shard_costs_its_own_parts(
    seaweedfs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index at the shard's end, and the chunk; a shard has 64 of them here."""
    zarr = pytest.importorskip("zarr", minversion="3")
    row = PART_BYTES // 8
    values = numpy.random.default_rng(3).random((64, row))
    how: dict[str, Any] = {
        "shape": values.shape,
        "shards": values.shape,
        "chunks": (1, row),
        "compressors": None,
    }
    zarr.create_array(str(tmp_path / "a.zarr"), dtype="f8", **how)[:] = values
    for path in (tmp_path / "a.zarr").rglob("*"):
        if path.is_file():
            seaweedfs.put(str(path.relative_to(tmp_path)), path.read_bytes())
    with counted(seaweedfs, tmp_path, monkeypatch) as parts:
        array = zarr.open_array(f"shardcache::{seaweedfs.url}/a.zarr", mode="r")
        assert (array[7] == values[7]).all()
    assert parts[0] <= 1 + 2 + 2  # of its description, of its index, and of the chunk


def test_lance_reads_no_such_urls(tmp_path: Path) -> None:
    """Its stores are its own, so the endpoint or a folder that `get` makes must serve."""
    lance = pytest.importorskip("lance")
    with pytest.raises((ValueError, OSError), match="shardcache"):
        lance.dataset(f"shardcache://file://{tmp_path}/t.lance")
