"""Samples whose keys have dots: names are split at the last one, and an index says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ConfigError
from shardcache_client.dataset import ShardDataset
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import pack
from support.stores.canary import Canary, GatedStore

KEYS = [f"spk{number}.2026.take-{take}" for number in range(2) for take in range(3)]

PART_BYTES = 64 * 1024


@pytest.fixture
def wenet(tmp_path: Path) -> Path:
    """A folder with one shard in WeNet's form."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.tar").write_bytes(wenet_tar())
    return folder


def wenet_tar() -> bytes:
    """Return a tar with the audio and text of each key."""
    return pack([(f"{key}.{ext}", key.encode()) for key in KEYS for ext in ("wav", "txt")])


def dataset(url: str, daemon: Daemon, **options: Any) -> ShardDataset[Any]:
    """Return a dataset that yields samples in their order."""
    return ShardDataset(url, socket=daemon.socket, **options)


@pytest.mark.parametrize("pattern", ["a.tar", "{a..a}.tar", "*.tar", ""])
def test_keys_end_at_the_last_dot(pattern: str, wenet: Path, daemon: Daemon) -> None:
    """By whatever pattern the shard is named; members keep their extensions."""
    samples = list(dataset(f"file://{wenet}/{pattern}", daemon, key_split="last-dot"))
    assert keys_of(samples) == KEYS
    assert all(sample["wav"] == sample["txt"] == sample["__key__"].encode() for sample in samples)


def test_both_splits_of_a_shard_are_read_side_by_side(wenet: Path, daemon: Daemon) -> None:
    """Neither job gets the other's samples, nor its counts."""
    url = f"{wenet}/a.tar"
    for _ in range(2):
        assert keys_of(dataset(url, daemon)) == ["spk0", "spk1"]
        assert keys_of(dataset(url, daemon, key_split="last-dot")) == KEYS
        daemon.await_publication()
    counts = [
        dataset(url, daemon, key_split=split).manifest.samples
        for split in ("first-dot", "last-dot")
    ]
    assert counts == [2, 6]
    daemon.evict(f"{wenet}/*.tar")
    assert [row for row in daemon.shards() if str(wenet) in row["url"]] == []


def test_url_says_where_names_are_split(wenet: Path, daemon: Daemon) -> None:
    """For interfaces without the argument, such as webdataset's."""
    pytest.importorskip("webdataset")
    from shardcache_client.webdataset import WebDataset

    samples = WebDataset(
        f"file://{wenet}/a.tar#key_split=last-dot", shardshuffle=False, socket=daemon.socket
    )
    assert keys_of(samples) == KEYS


def test_shard_is_split_at_the_last_dot_while_it_arrives(daemon: Daemon) -> None:
    """By the reader, from the url alone."""
    with GatedStore() as server:
        body = wenet_tar()
        url = server.put("a.tar", body)
        server.let("a.tar")
        assert keys_of(dataset(url, daemon, key_split="last-dot")) == KEYS


def test_index_says_where_names_are_split(wenet: Path, daemon: Daemon) -> None:
    """It is read without the argument. An index of the other split is refused with it."""
    shard = f"file://{wenet}/a.tar"
    last, first = (wenet / f"{name}.json" for name in ("last", "first"))
    ran = shardcache(
        "index", "--key-split", "last-dot", shard, "-o", last, "--samples", socket=daemon.socket
    )
    assert ran.code == 0, ran.err
    (row,) = json.loads(last.read_text())["shardlist"]
    assert row["url"] == f"{shard}#key_split=last-dot"
    assert row["nsamples"] == len(KEYS)
    for options in ({}, {"key_split": "last-dot"}):
        chosen = dataset(str(last), daemon, **options).select(
            lambda row: row.key.endswith("take-1")
        )
        assert keys_of(chosen) == [key for key in KEYS if key.endswith("take-1")]
    with dataset(str(last), daemon).indexed() as samples:
        assert samples[4]["__key__"] == KEYS[4]

    assert shardcache("index", shard, "-o", first, socket=daemon.socket).code == 0
    with pytest.raises(ConfigError, match="first dot") as caught:
        dataset(str(first), daemon, key_split="last-dot")
    assert "shardcache index --key-split last-dot" in str(caught.value)


def test_single_samples_are_fetched_by_their_ranges(tmp_path: Path) -> None:
    """The table says where they are, though the first dot would end all keys early."""
    members = [(f"{key}.{ext}", bytes(PART_BYTES)) for key in KEYS for ext in ("wav", "txt")]
    flags = ("--range-part-size", str(PART_BYTES), "--whole-from-percent", "100")
    with Canary() as store, Daemon(tmp_path, *flags) as daemon:
        store.files["/a.tar"] = pack(members)
        index = tmp_path / "index.json"
        shard = store.url("/a.tar")
        ran = shardcache(
            "index",
            "--key-split",
            "last-dot",
            shard,
            "-o",
            index,
            "--samples",
            socket=daemon.socket,
        )
        assert ran.code == 0, ran.err
        daemon.evict(shard)

        store.requests.clear()
        with dataset(f"file://{index}", daemon).indexed() as samples:
            assert samples[0]["__key__"] in KEYS
        assert 0 < store.asked_bytes(".tar") < len(store.files["/a.tar"])
        assert sorted(keys_of(dataset(f"file://{index}", daemon, shuffle="global"))) == KEYS


def test_keys_of_other_formats_are_their_own(wenet: Path, daemon: Daemon) -> None:
    """A split is an error where no names are split."""
    (wenet / "b.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="key_split is for tars"):
        dataset(f"file://{wenet}/b.jsonl", daemon, key_split="last-dot")
