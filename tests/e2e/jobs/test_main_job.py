"""The main job on a real S3 server: SeaweedFS → daemon → torchrun with two ranks of two workers."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import train

from shardcache.errors import AccessDeniedError, NotFoundError, TruncatedShardError
from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.programs.ranks import torchrun
from support.shards.tars import make_tar, random_samples
from support.stores.seaweedfs import SeaweedFS

SHARDS = 6
SAMPLES = 20
SIZES = {"jpg": 30_000, "cls": 2}
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]

pytestmark = pytest.mark.slow


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


def test_torchrun_reads_every_sample_once_from_s3(daemon: Daemon, bucket: str) -> None:
    """Two ranks of two workers read each sample once an epoch, and each byte once."""
    ranks = torchrun(train, daemon.socket, f"{bucket}/index.json", "fork")
    for epoch in range(2):
        assert sorted(key for rank in ranks for key in rank[epoch]) == KEYS
    eventually(lambda: daemon.sessions() == 0)
    assert daemon.leases() == 0
    wanted_bytes = sum(len(shard(number)) for number in range(SHARDS))
    assert daemon.status()["counters"]["origin_bytes"] == wanted_bytes


def test_errors_of_a_store_reach_the_training_script(
    daemon: Daemon, bucket: str, seaweedfs_server: SeaweedFS, tmp_path: Path
) -> None:
    """A missing bucket and wrong credentials are errors before training, the latter with a remedy.

    A tar cut exactly between two members loses no sample in silence.
    """
    with pytest.raises(NotFoundError, match="no-such-bucket"):
        ShardDataset("s3://no-such-bucket/shards/", socket=daemon.socket)
    url = seaweedfs_server.put("train", "cut.tar", shard(0)[: 3 * (512 + 30_208 + 1024)])
    with pytest.raises(TruncatedShardError, match=r"cut\.tar"):
        list(ShardDataset(url, socket=daemon.socket))
    env = seaweedfs_server.env() | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    complaint = r"shards[\s\S]*What to do: give the daemon credentials"
    with Daemon(tmp_path, env=env) as other, pytest.raises(AccessDeniedError, match=complaint):
        ShardDataset(f"{bucket}/shards/", socket=other.socket)
