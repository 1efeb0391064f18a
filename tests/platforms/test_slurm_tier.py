"""A cluster's tier by deploy/slurm on two nodes of a real Slurm: the site's, and a job's."""

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from support.cluster.tier import why_no_tier
from support.network.ports import free_port
from support.platforms.slurm import JOB_LIMIT_S, NODES, Job, Slurm, deployed, why_not
from support.programs.daemon import Daemon
from support.programs.processes import kill_tree
from support.shards.tars import make_tar, random_samples
from support.stores.throttled_s3 import ThrottledS3

SHARDS = 6
ADDRESSES = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
LIST = ",".join(f"{node}={address}" for node, address in ADDRESSES.items())
LIMIT_S = 60.0
WHY_NOT = why_not() or why_no_tier()

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(2 * JOB_LIMIT_S),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"Slurm: {WHY_NOT}"),
]

SITE = """
job_memory=({disk}/shardcache-"$SLURM_JOB_ID"-*)
start_daemon=(true)
tier={disk}/run/front.sock
start_tier=({disk}/start-tier)
"""
# A service manager's part: the command outlives the prolog, and has nothing of the job's
# environment.
START_TIER = """#!/bin/sh
setsid env --ignore-environment {python} -m shardcache cluster run {options} \\
    </dev/null >{folder}/tier.log 2>&1 &
echo $! >{folder}/tier.pid
until curl --silent --fail --unix-socket {folder}/run/front.sock http://tier/.shardcache/peers; do
    sleep 0.1
done
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    (folder / "data").mkdir()
    for number in range(SHARDS):
        (folder / "data" / f"{number}.tar").write_bytes(make_tar(random_samples(20)))
    return folder


@pytest.fixture(scope="module")
def size_bytes(shards: Path) -> int:
    return sum(path.stat().st_size for path in (shards / "data").iterdir())


@pytest.fixture(scope="module")
def store(shards: Path) -> Iterator[ThrottledS3]:
    """A store that has them, and counts the bytes that it sends."""
    with ThrottledS3(shards, first_byte_s=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(store: ThrottledS3) -> Iterator[Slurm]:
    """A cluster with the scripts of deploy/slurm, and a command per node to start its tier."""
    owner_port = free_port()
    with deployed(SITE) as running:
        for node in NODES:
            folder = running.disk(node)
            options = (
                f"--nodes {LIST} --node {node} --store {store.endpoint_url} --user root "
                f"--owner-port {owner_port} --cache-dir {folder}/tier --run-dir {folder}/run "
                "--min-free 1MB"
            )
            script = START_TIER.format(python=sys.executable, options=options, folder=folder)
            (folder / "start-tier").write_text(script)
            (folder / "start-tier").chmod(0o755)
        try:
            yield running
        finally:
            running.cancel_all()
            for node in NODES:
                pid = running.disk(node) / "tier.pid"
                if pid.exists():
                    kill_tree(int(pid.read_text()))


@pytest.fixture
def daemons(cluster: Slurm, store: ThrottledS3) -> Iterator[list[Daemon]]:
    """The daemon that each node has as a service, which uses its node's tier."""
    with ExitStack() as stack:
        running = []
        for node in NODES:
            tables = [{"match": "s3://", "tier": str(cluster.disk(node) / "run" / "front.sock")}]
            env = store.env() | {"SHARDCACHE_ORIGIN": json.dumps(tables)}
            running.append(stack.enter_context(Daemon(cluster.disk(node), env=env)))
        yield running


def warm(cluster: Slurm, example: str, env: dict[str, str] | None = None) -> Job:
    """Have every task of a job fetch all shards to its node; it succeeds."""
    job = cluster.submit(
        example, "shardcache", "warm", f"s3://data/{{0..{SHARDS - 1}}}.tar", env=env
    )
    assert job.wait() == "COMPLETED", job.said() + logs(cluster, job)
    return job


def logs(cluster: Slurm, job: Job) -> str:
    return "".join(
        path.read_text()
        for path in (cluster.root / "scripts").glob(f"shardcache-{job.number}-*.log")
    )


def test_all_jobs_share_what_the_sites_tier_has_fetched(
    cluster: Slurm, daemons: list[Daemon], store: ThrottledS3, size_bytes: int
) -> None:
    """Both nodes take one copy from the store, and the next job takes nothing."""
    before = store.stats().sent_bytes
    warm(cluster, "site-daemon.sbatch")
    assert [len(daemon.shards()) for daemon in daemons] == [SHARDS, SHARDS]
    # Not a byte twice, but for the single ones by which each caller's permission is checked.
    assert 0 <= store.stats().sent_bytes - before - size_bytes < size_bytes / SHARDS
    for node in NODES:
        assert "no tier answers" in (cluster.disk(node) / "told").read_text()

    before = store.stats().sent_bytes
    for daemon in daemons:
        daemon.kill()
        shutil.rmtree(daemon.cache_dir)
        daemon.start()
    warm(cluster, "site-daemon.sbatch")
    assert [len(daemon.shards()) for daemon in daemons] == [SHARDS, SHARDS]
    assert store.stats().sent_bytes - before < size_bytes / SHARDS
    for node in NODES:
        assert (cluster.disk(node) / "told").read_text().count("no tier answers") == 1


def own_tier(cluster: Slurm, store: ThrottledS3) -> dict[str, str]:
    """Return what a job is told that brings daemons and tier."""
    disk = str(cluster.node_disk)
    daemon = {
        "NODE_DISK": disk,
        "NODE_MEMORY": disk,
        "SHARDCACHE_CAPACITY": "1GB",
        "SHARDCACHE_MIN_FREE": "0",
    }
    tier = {
        "TIER_STORE": store.endpoint_url,
        "TIER_NODES": LIST,
        "TIER_OPTIONS": "--user root --min-free 1MB",
    }
    return daemon | tier | store.env()


def check_nothing_left(cluster: Slurm, job: Job) -> None:
    """No process, nginx, folder or key of a job is left on any node."""
    assert cluster.processes() == []
    assert not any(is_served(job, node) for node in NODES)
    folders = [*map(cluster.disk, NODES), cluster.root / "scripts"]
    assert [
        path
        for folder in folders
        for path in folder.glob(f"shardcache-{job.number}*")
        if path.is_dir()
    ] == []


def is_served(job: Job, node: str) -> bool:
    """Return True if a node's part of a job's own tier listens."""
    with (
        suppress(OSError),
        socket.create_connection((ADDRESSES[node], 10_000 + job.number % 10_000), timeout=5),
    ):
        return True
    return False


def test_a_job_brings_its_own_tier(cluster: Slurm, store: ThrottledS3, size_bytes: int) -> None:
    """The nodes take one copy from the store, and the next job's tier begins again."""
    for _ in range(2):
        before = store.stats().sent_bytes
        job = warm(cluster, "own-daemon.sbatch", env=own_tier(cluster, store))
        sent_bytes = store.stats().sent_bytes - before
        assert 0 <= sent_bytes - size_bytes < size_bytes / SHARDS, logs(cluster, job)
        check_nothing_left(cluster, job)
