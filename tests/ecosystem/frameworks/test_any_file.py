"""Other projects' readers over `shardcache::` urls, and folders that `shardcache get` makes."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.tars import make_tar
from support.stores.buckets import Bucket

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

# As the entry point of a wheel does.
fsspec.register_implementation("shardcache", ShardcacheFileSystem, clobber=True)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a daemon may read, which is this node's."""
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-eco-") as name,
        Daemon(Path(name)) as daemon,
    ):
        monkeypatch.setenv("SHARDCACHE_SOCKET", str(daemon.socket))
        ShardcacheFileSystem.clear_instance_cache()
        yield Path(name)


def polars_sum(polars: Any, url: str) -> int:
    with fsspec.open(url) as file:  # polars' own urls are those of stores that it knows
        return int(polars.read_parquet(file)["n"].sum())


def datasets_sum(datasets: Any, url: str) -> int:
    rows = datasets.load_dataset(
        "parquet", data_files=url.replace("shardcache://", "shardcache::"), split="train"
    )
    return sum(row["n"] for row in rows)


@pytest.mark.parametrize(
    ("package", "read"),
    [
        ("pandas", lambda pandas, url: pandas.read_parquet(url)["n"].sum()),
        ("polars", polars_sum),
        ("datasets", datasets_sum),
    ],
)
def test_tables_are_read_by_their_urls(
    folder: Path, package: str, read: Callable[[Any, str], int]
) -> None:
    """With `::` or without; datasets takes only the former."""
    pytest.importorskip("pandas").DataFrame({"n": range(1_000)}).to_parquet(
        folder / "table.parquet"
    )
    total = read(pytest.importorskip(package), f"shardcache://file://{folder}/table.parquet")
    assert total == 499_500


@pytest.fixture
def tables(folder: Path, moto: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of S3 with a table as parquet and JSON, and a shard, over its own daemon."""
    rows = pytest.importorskip("pandas").DataFrame({"n": range(1_000)})
    moto.put("d/t.parquet", rows.to_parquet())
    moto.put("d/t.json", rows.to_json(orient="records", lines=True).encode())
    moto.put("d/t.tar", make_tar({"__key__": f"{number:03}", "txt": b"1"} for number in range(10)))
    (folder / "s3").mkdir()
    with Daemon(folder / "s3", env=moto.env()) as daemon:
        monkeypatch.setenv("SHARDCACHE_SOCKET", str(daemon.socket))
        for name in moto.env():
            monkeypatch.delenv(name)
        yield f"{moto.url}/d"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", ["t", "*"])
@pytest.mark.parametrize(
    ("kind", "suffix", "count"),
    [("parquet", "parquet", 1_000), ("json", "json", 1_000), ("webdataset", "tar", 10)],
)
def test_datasets_loads_and_streams_files(
    tables: str, tmp_path: Path, kind: str, suffix: str, count: int, name: str, streaming: bool
) -> None:
    """By a url or a glob, through the cache alone: this process has no credentials."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset(
        kind,
        data_files=[f"shardcache::{tables}/{name}.{suffix}"],
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    assert len(list(rows)) == count


def test_duckdb_queries_a_registered_filesystem(tables: str) -> None:
    """By a url or a glob; twice, the second time by what DuckDB has kept."""
    duckdb = pytest.importorskip("duckdb", minversion="1")
    database = duckdb.connect()
    database.register_filesystem(fsspec.filesystem("shardcache"))
    for name in ("t", "*", "t"):
        found = database.sql(
            f"select sum(n) from 'shardcache://{tables}/{name}.parquet'"
        ).fetchall()
        assert found == [(499_500,)]


def test_zarr_reads_an_array(folder: Path) -> None:
    """Chunk by chunk, and what is not there is not."""
    zarr = pytest.importorskip("zarr")
    made = zarr.open_array(
        str(folder / "a.zarr"), mode="w", shape=(1_000,), chunks=(100,), dtype="i4", fill_value=7
    )
    made[100:] = range(900)
    found = zarr.open_array(f"shardcache::file://{folder}/a.zarr", mode="r")
    assert found[:].sum() == 700 + sum(range(900))


def test_lance_reads_a_table_that_get_has_put_into_a_folder(folder: Path) -> None:
    """It reads no filesystem of fsspec: by a path."""
    lance = pytest.importorskip("lance")
    pyarrow = pytest.importorskip("pyarrow")
    lance.write_dataset(pyarrow.table({"n": range(1_000)}), str(folder / "t.lance"))
    assert shardcache("get", f"{folder}/t.lance/", folder / "local.lance").code == 0
    assert lance.dataset(str(folder / "local.lance")).to_table()["n"].to_pylist() == list(
        range(1_000)
    )


def test_transformers_load_a_model_that_get_has_put_into_a_folder(folder: Path) -> None:
    """`shardcache get`, then from_pretrained with the folder."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = transformers.BertModel(transformers.BertConfig(vocab_size=32, **sizes))
    model.save_pretrained(folder / "bert")
    assert shardcache("get", f"{folder}/bert/", folder / "local").code == 0
    loaded = transformers.AutoModel.from_pretrained(folder / "local")
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items()
    )
