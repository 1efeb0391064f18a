"""Files of formats that others open, too: each byte is fetched once, whoever is first."""

from pathlib import Path
from typing import Any

import pytest

from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import cached_paths, open_cached
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.file_formats import FORMATS, plain, rows_of_shard
from support.shards.tars import make_tar
from support.stores.buckets import Bucket

NAMES = ("a.parquet", "deflated.ZIP", "stored.zip", "a.jsonl", "d.jsonl.zst", "a.tfrecord")
ROWS = rows_of_shard(0)


def _param(name: str) -> Any:
    return pytest.param(name, marks=[] if name == NAMES[0] else [pytest.mark.slow])


NAMED = pytest.mark.parametrize("name", [*map(_param, NAMES)])


def uploaded(bucket: Bucket, key: str, name: str) -> tuple[str, bytes]:
    data = FORMATS[name](ROWS)
    bucket.put(key, data)
    return f"{bucket.url}/{key}", data


def fetched_bytes(daemon: Daemon) -> int:
    daemon.await_publication()
    return int(daemon.status()["counters"]["origin_bytes"])


def samples_of(url: str, daemon: Daemon) -> list[dict[str, Any]]:
    return [plain(sample) for sample in ShardDataset(url, shuffle=False, socket=daemon.socket)]


@pytest.mark.slow
@NAMED
def test_cached_file_gives_samples_without_another_fetch(
    store_daemon: Daemon, bucket: Bucket, name: str
) -> None:
    """A program has opened the file before: the samples are made of the cached bytes."""
    url, data = uploaded(bucket, f"opened/{name}", name)
    before = fetched_bytes(store_daemon)
    with cached_paths(url, socket=store_daemon.socket) as (path,):
        assert Path(path).read_bytes() == data
    assert samples_of(url, store_daemon) == ROWS
    assert fetched_bytes(store_daemon) - before == len(data)


@pytest.mark.slow
@NAMED
def test_warm_leaves_what_a_dataset_reads(store_daemon: Daemon, bucket: Bucket, name: str) -> None:
    """Indexed, and in the form that is cached for samples: reading fetches nothing."""
    url, data = uploaded(bucket, f"warm/{name}", name)
    before = fetched_bytes(store_daemon)
    shardcache("warm", url, socket=store_daemon.socket)
    (row,) = [row for row in store_daemon.shards() if row["url"] == url]
    assert row["samples"] == len(ROWS)
    assert samples_of(url, store_daemon) == ROWS
    assert fetched_bytes(store_daemon) - before == len(data)


def test_warm_leaves_the_own_bytes_on_demand(store_daemon: Daemon, bucket: Bucket) -> None:
    """For programs that open the file: it is there, and samples are made of it."""
    url, data = uploaded(bucket, "files/a.parquet", "a.parquet")
    before = fetched_bytes(store_daemon)
    shardcache("warm", "--files", url, socket=store_daemon.socket)
    with open_cached(url, socket=store_daemon.socket) as file:
        assert file.read() == data
    assert samples_of(url, store_daemon) == ROWS
    assert fetched_bytes(store_daemon) - before == len(data)


def test_zip_that_is_no_shard_is_cached_as_a_file(store_daemon: Daemon, bucket: Bucket) -> None:
    """`warm` fails, as a dataset would, and says how programs get what they open themselves."""
    data = bytearray(FORMATS["stored.zip"](ROWS))
    data[data.index(b"PK\1\2") + 8] |= 1  # encrypted
    bucket.put("secret/a.zip", bytes(data))
    url = f"{bucket.url}/secret/a.zip"
    ran = shardcache("warm", url, socket=store_daemon.socket)
    assert ran.code == 1
    assert "of the zip is encrypted" in ran.out
    assert "shardcache warm --files" in ran.out
    assert shardcache("warm", "--files", url, socket=store_daemon.socket).code == 0
    with open_cached(url, socket=store_daemon.socket) as file:
        assert file.read() == data


@pytest.mark.slow
@NAMED
def test_get_puts_the_objects_own_bytes(
    store_daemon: Daemon, bucket: Bucket, tmp_path: Path, name: str
) -> None:
    """Also of a shard whose samples have been read."""
    url, data = uploaded(bucket, f"get/{name}", name)
    assert samples_of(url, store_daemon) == ROWS
    shardcache("get", url, str(tmp_path / name), socket=store_daemon.socket)
    assert (tmp_path / name).read_bytes() == data


@pytest.mark.slow
def test_manifest_beside_tars_is_no_shard_of_their_prefix(
    store_daemon: Daemon, bucket: Bucket
) -> None:
    """Tables that belong to the tars lie in the same folder; by their own urls they are shards."""
    bucket.put("beside/0.tar", make_tar([{"__key__": "n000", "cls": b"1"}]))
    manifest, _ = uploaded(bucket, "beside/manifest.jsonl", "a.jsonl")
    samples = list(ShardDataset(f"{bucket.url}/beside/", shuffle=False, socket=store_daemon.socket))
    assert [sample["cls"] for sample in samples] == [b"1"]
    assert samples_of(manifest, store_daemon) == ROWS
