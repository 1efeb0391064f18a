"""The main job on a real S3 server: SeaweedFS → daemon → torchrun with two ranks of two workers."""

import bz2
import gzip
import json
import lzma
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import train

from shardcache.errors import AccessDeniedError, NotFoundError, TruncatedShardError
from shardcache.store.partial import zstd
from shardcache_client import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.programs.ranks import torchrun
from support.shards.tars import make_tar, random_samples
from support.stores.seaweedfs import SeaweedFS

SHARDS = 6
SAMPLES = 20
SIZES = {"jpg": 30_000, "cls": 2}


@pytest.fixture(scope="module")
def bucket(seaweedfs_server: SeaweedFS) -> str:
    """A bucket with a few shards and an index file."""
    seaweedfs_server.make_bucket("train")
    for number in range(SHARDS):
        seaweedfs_server.put("train", f"shards/{number:04d}.tar", shard(number))
    rows = [{"url": f"shards/{number:04d}.tar", "nsamples": SAMPLES} for number in range(SHARDS)]
    seaweedfs_server.put("train", "index.json", json.dumps({"shardlist": rows}).encode())
    return "s3://train"


@pytest.fixture(scope="module")
def daemon(seaweedfs_server: SeaweedFS) -> Iterator[Daemon]:
    """A daemon with the store's credentials in its own environment, and nowhere else."""
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-s3-") as root,
        Daemon(Path(root), "--part-size", "256KiB", env=seaweedfs_server.env()) as running,
    ):
        yield running


def shard(number: int) -> bytes:
    """Return one shard's tar."""
    return make_tar(random_samples(SAMPLES, SIZES, first=number * SAMPLES))


def keys_of(dataset: ShardDataset) -> list[str]:
    """Return the keys of what a dataset gives."""
    return [sample["__key__"] for sample in dataset]


@pytest.mark.slow
def test_torchrun_reads_every_sample_once_from_s3(daemon: Daemon, bucket: str) -> None:
    """Two epochs by two ranks of two workers: each sample once an epoch, each byte once from the store."""
    ranks = torchrun(train, daemon.socket, f"{bucket}/index.json", "fork")
    for epoch in range(2):
        keys = [key for rank in ranks for key in rank[epoch]]
        assert sorted(keys) == [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
    eventually(lambda: daemon.sessions() == 0)
    assert daemon.leases() == 0
    wanted_bytes = sum(len(shard(number)) for number in range(SHARDS))
    assert daemon.status()["counters"]["origin_bytes"] == wanted_bytes


@pytest.mark.parametrize("pattern", ["shards/", "shards/*.tar", "index.json"])
def test_other_ways_to_name_the_same_shards(daemon: Daemon, bucket: str, pattern: str) -> None:
    """A prefix, a glob and an index file lead to the same samples, in the same order, and to their number once read."""
    dataset = ShardDataset(f"{bucket}/{pattern}", socket=daemon.socket)
    assert [ref.url for ref in dataset.manifest] == [f"{bucket}/shards/{number:04d}.tar" for number in range(SHARDS)]
    assert keys_of(dataset) == [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
    assert len(ShardDataset(f"{bucket}/{pattern}", socket=daemon.socket)) == SHARDS * SAMPLES


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".tar.gz", gzip.compress),
        (".tgz", gzip.compress),
        (".tar.zst", zstd.compress),
        (".tar.bz2", bz2.compress),
        (".tar.xz", lzma.compress),
    ],
)
def test_compressed_shards_are_kept_plain(
    daemon: Daemon, bucket: str, seaweedfs_server: SeaweedFS, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    """Whatever the compression, samples come out, and the cache holds the plain tar."""
    url = seaweedfs_server.put("train", f"packed/0000{suffix}", compress(shard(0)))
    assert keys_of(ShardDataset(url, socket=daemon.socket)) == [f"{number:06d}" for number in range(SAMPLES)]
    kept = next(kept for kept in daemon.shards() if kept["url"] == url)
    assert kept["size_bytes"] == len(shard(0))


def test_a_bucket_that_does_not_exist_is_named(daemon: Daemon) -> None:
    """Making the dataset tells, before any training begins."""
    with pytest.raises(NotFoundError, match="no-such-bucket"):
        ShardDataset("s3://no-such-bucket/shards/", socket=daemon.socket)


def test_a_truncated_upload_is_refused_with_its_url(daemon: Daemon, bucket: str, seaweedfs_server: SeaweedFS) -> None:
    """A tar cut exactly between two members loses no sample in silence."""
    url = seaweedfs_server.put("train", "cut.tar", shard(0)[: 3 * (512 + 30_208 + 1024)])
    with pytest.raises(TruncatedShardError, match=r"cut\.tar"):
        keys_of(ShardDataset(url, socket=daemon.socket))


def test_wrong_credentials_are_named_as_such(seaweedfs_server: SeaweedFS, bucket: str, tmp_path: Path) -> None:
    """The training script learns that the daemon's credentials are refused, and where to give others."""
    env = seaweedfs_server.env() | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    complaint = r"shards[\s\S]*What to do: give the daemon credentials"
    with Daemon(tmp_path, env=env) as daemon, pytest.raises(AccessDeniedError, match=complaint):
        ShardDataset(f"{bucket}/shards/", socket=daemon.socket)
