"""Shards written by `shardcache write` and `ShardWriter`, read by ShardDataset through a daemon."""

import json
from pathlib import Path

import numpy
import pytest

from shardcache.writing import ShardWriter
from shardcache_client.dataset import ShardDataset
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.stores.buckets import Bucket

LINES = 300


@pytest.mark.slow
def test_lines_are_read_back_in_any_order(folder: Path, moto: Bucket) -> None:
    """The length is exact before anything is fetched, and every line comes once, unchanged."""
    lines = [
        json.dumps({"number": number, "text": "ü" * (number % 50)}, ensure_ascii=False)
        for number in range(LINES)
    ]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    flags = ("--pack", "--shard-size", "9kB", "--workers", "1", "--json")
    ran = shardcache("write", folder / "lines.jsonl", f"{moto.url}/text", *flags)
    assert ran.code == 0, ran.err
    with Daemon(folder, env=moto.env()) as daemon:
        dataset = ShardDataset(ran.json["index"], shuffle=True, seed=7, socket=daemon.socket)
        assert len(dataset) == LINES
        assert daemon.status()["counters"]["origin_bytes"] == 0
        read = [(sample["__key__"], sample["json"].decode()) for sample in dataset]
    assert sorted(read) == [(f"{number:09d}", line) for number, line in enumerate(lines)]
    assert read != sorted(read)


def test_samples_of_a_program_are_read_back(tmp_path: Path, daemon: Daemon) -> None:
    """Relative names in the index of a local folder lead to its shards, also after it was moved."""
    with ShardWriter(tmp_path / "first", shard_size_bytes=100_000) as shards:
        for number in range(200):
            shards.write(
                {
                    "__key__": f"a/{number}",
                    "npy": numpy.arange(number),
                    "cls": number,
                    "json": [number],
                }
            )
    (tmp_path / "first").rename(tmp_path / "moved")
    dataset = ShardDataset(tmp_path / "moved" / "index.json", socket=daemon.socket)
    assert len(dataset) == 200
    read = list(dataset)
    assert keys_of(read) == [f"a/{number}" for number in range(200)]
    assert [(sample["cls"], sample["json"]) for sample in read] == [
        (b"%d" % n, b"[%d]" % n) for n in range(200)
    ]
