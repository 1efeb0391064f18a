"""Shards written by `shardcache write` and `ShardWriter`, read by ShardDataset through a daemon."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from torch.utils.data import DataLoader

from shardcache.writing import ShardWriter
from shardcache_client import ShardDataset
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.stores.buckets import Bucket

LINES = 3_000


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="shardcache-written-") as name:
        yield Path(name)


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.slow), ("--pack",)])
def test_lines_are_read_back_in_any_order(root: Path, moto: Bucket, flags: tuple[str, ...]) -> None:
    """From an object store: the length is exact before anything is fetched, and every line comes once, unchanged."""
    lines = [json.dumps({"number": number, "text": "ü" * (number % 50)}, ensure_ascii=False) for number in range(LINES)]
    (root / "lines.jsonl").write_text("\n".join(lines))
    flags = ("--shard-size", "90kB", "--workers", "1", "--json", *flags)
    ran = shardcache("write", root / "lines.jsonl", f"{moto.url}/text", *flags)
    assert ran.code == 0, ran.err
    with Daemon(root, env=moto.env()) as daemon:
        dataset = ShardDataset(ran.json["index"], shuffle=True, seed=7, socket=daemon.socket)
        assert len(dataset) == LINES and daemon.status()["counters"]["origin_bytes"] == 0
        read = [(sample["__key__"], sample["json"].decode()) for sample in DataLoader(dataset, None, num_workers=2)]
    assert sorted(read) == [(f"{number:09d}", line) for number, line in enumerate(lines)]
    assert read != sorted(read)


def test_samples_of_a_program_are_read_back(root: Path) -> None:
    """Relative names in the index of a local folder lead to its shards, also after it was moved."""
    with ShardWriter(root / "first", shard_size_bytes=100_000) as shards:
        for number in range(200):
            shards.write({"__key__": f"a/{number}", "npy": numpy.arange(number), "cls": number, "json": [number]})
    (root / "first").rename(root / "moved")
    with Daemon(root) as daemon:
        dataset = ShardDataset(root / "moved" / "index.json", socket=daemon.socket)
        assert len(dataset) == 200
        read = list(iter(dataset))
    assert [sample["__key__"] for sample in read] == [f"a/{number}" for number in range(200)]
    assert [(sample["cls"], sample["json"]) for sample in read] == [(b"%d" % n, b"[%d]" % n) for n in range(200)]
