"""A daemon and shards for the tests of a module."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon
from support.shards.reading import write_index
from support.shards.tars import BATCH, COUNTS, Make, write_indexed, write_shards
from support.stores.buckets import Bucket, MotoS3, new_bucket

SHARDS = 8
SAMPLES = 25


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path: pytest's own may be too long for a socket's."""
    with tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def urls(folder: Path) -> str:
    """The pattern of 8 shards with 25 samples each."""
    source = folder / "source"
    source.mkdir()
    write_shards(source, SHARDS, SAMPLES)
    return f"file://{source}/shard-{{000000..{SHARDS - 1:06d}}}.tar"


@pytest.fixture(scope="module")
def index(folder: Path, urls: str) -> str:
    """An index file of the same shards, which counts their samples before anybody reads."""
    return write_index(folder / "source", [SAMPLES] * SHARDS, "shard-{:06d}.tar")


@pytest.fixture(scope="module")
def keys() -> list[str]:
    """The keys of all samples, sorted."""
    return [f"{number:06d}" for number in range(SHARDS * SAMPLES)]


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    """A daemon for the whole module."""
    with Daemon(folder) as running:
        yield running


@pytest.fixture(scope="module")
def train(folder: Path) -> str:
    """The index file of shards with uneven counts."""
    return write_indexed(folder / "train", COUNTS)


@pytest.fixture
def make(daemon: Daemon, train: str) -> Make:
    """A function that makes the dataset anew, as each process of a job would."""

    def make_dataset(url: str = train, **options: Any) -> ShardDataset:
        chosen = {
            "shuffle": True,
            "shuffle_window": 3,
            "seed": 7,
            "batch_size": BATCH,
            "socket": daemon.socket,
        }
        return ShardDataset(url, **chosen | options)

    return make_dataset


@pytest.fixture(scope="module")
def bucket(moto_server: MotoS3) -> Bucket:
    """A bucket for the whole module."""
    return new_bucket(moto_server)


@pytest.fixture(scope="module")
def store_daemon(folder: Path, bucket: Bucket) -> Iterator[Daemon]:
    """A daemon for the whole module that reads from the bucket."""
    with Daemon(folder, env=bucket.env()) as running:
        yield running
