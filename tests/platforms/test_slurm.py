"""Jobs of a real Slurm, on two nodes of two tasks, by the scripts of deploy/slurm as they are."""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest

from support.platforms.slurm import JOB_LIMIT_S, NODES, PAUSE_S, Job, Slurm, deployed, why_not
from support.programs.daemon import Daemon, eventually
from support.programs.examples import EXAMPLES, reports
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

JOB = Path(__file__).with_name("slurm_job.py")
SHARDS = 6
SAMPLES = 12
TASKS = 4
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
LIMIT_S = 60.0
WHY_NOT = why_not()

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(2 * JOB_LIMIT_S),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"Slurm: {WHY_NOT}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with deployed("start_daemon=(touch {disk}/told-to-start)\n") as running:
        yield running


@pytest.fixture(scope="class")
def daemons(cluster: Slurm, moto_server: MotoS3) -> Iterator[dict[str, Daemon]]:
    """The daemon that each node has as a service."""
    with ExitStack() as stack:
        env = moto_server.env()
        yield {node: stack.enter_context(Daemon(cluster.disk(node), env=env)) for node in NODES}


@pytest.fixture(scope="module")
def urls(moto_server: MotoS3) -> str:
    moto_server.make_bucket("slurm")
    rows = [{"url": f"{number}.tar", "nsamples": SAMPLES} for number in range(SHARDS)]
    for number, row in enumerate(rows):
        samples = random_samples(SAMPLES, {"jpg": 100}, first=number * SAMPLES)
        moto_server.put(
            "slurm", str(row["url"]), make_tar([sample | {"cls": b"1"} for sample in samples])
        )
    return moto_server.put(
        "slurm", "index.json", json.dumps({"wids_version": 1, "shardlist": rows}).encode()
    )


@pytest.fixture
def out(cluster: Slurm) -> Iterator[Path]:
    """A folder that all nodes share; no job of the test outlives it."""
    with tempfile.TemporaryDirectory(dir=cluster.root) as name:
        yield Path(name)
        cluster.cancel_all()


def own_daemon_env(cluster: Slurm, moto_server: MotoS3) -> dict[str, str]:
    """Return what a job with its own daemon is told: disk, options, credentials."""
    return {
        "NODE_DISK": str(cluster.node_disk),
        "SHARDCACHE_CAPACITY": "1GB",
        "SHARDCACHE_MIN_FREE": "0",
    } | (moto_server.env())


def wait_until_all_hold(job: Job, out: Path) -> None:
    """Return when every task has a sample. Raises AssertionError if the job ends before."""

    def do_they() -> bool:
        assert job.state() in ("PENDING", "RUNNING"), job.said()
        return len(list(out.iterdir())) == TASKS

    eventually(do_they, limit_s=JOB_LIMIT_S, pause_s=PAUSE_S)


def check_epochs(out: Path) -> None:
    """All tasks have read each sample once in either epoch, and equally many."""
    tasks = [json.loads(path.read_text()) for path in out.iterdir()]
    assert len(tasks) == TASKS
    for epoch in range(2):
        assert [len(task[epoch]) for task in tasks] == [len(KEYS) // TASKS] * TASKS
        assert sorted(chain.from_iterable(task[epoch] for task in tasks)) == KEYS


def check_nothing_left(cluster: Slurm, job: Job) -> None:
    """No process of a job, and none of its folders on any node; every node takes the next job."""
    assert cluster.processes() == []
    assert [
        path for node in NODES for path in cluster.disk(node).glob(f"shardcache-{job.number}*")
    ] == []
    eventually(
        lambda: cluster.node_states() == ["idle"] * len(NODES), limit_s=LIMIT_S, pause_s=PAUSE_S
    )


class TestSiteDaemon:
    """The site runs a daemon on each node."""

    def test_a_job_reads_through_one_daemon_a_node(
        self, cluster: Slurm, daemons: dict[str, Daemon], urls: str, out: Path
    ) -> None:
        """Four tasks share each epoch, and a node fetches no shard twice and keeps no lease."""
        job = cluster.submit("site-daemon.sbatch", sys.executable, JOB, urls, out)
        assert job.wait() == "COMPLETED", job.said()
        check_epochs(out)
        for daemon in daemons.values():
            daemon.await_publication()
            status = daemon.status()
            shards = daemon.shards()
            assert 0 < len(shards) <= SHARDS
            assert status["counters"]["origin_bytes"] == sum(
                shard["size_bytes"] for shard in shards
            )
            assert f"train-{job.number}" in [each["name"] for each in status["jobs"]]
            eventually(
                lambda daemon=daemon: daemon.sessions() == daemon.leases() == 0, limit_s=LIMIT_S
            )
        check_nothing_left(cluster, job)

    def test_a_job_that_is_cancelled_gives_back_its_leases(
        self, cluster: Slurm, daemons: dict[str, Daemon], urls: str, out: Path
    ) -> None:
        """No session, lease or process is left after scancel, and the daemons continue."""
        job = cluster.submit("site-daemon.sbatch", sys.executable, JOB, urls, out, "hold")
        wait_until_all_hold(job, out)
        eventually(lambda: all(daemon.leases() for daemon in daemons.values()), limit_s=LIMIT_S)
        job.cancel()
        assert job.wait() == "CANCELLED"
        for daemon in daemons.values():
            eventually(
                lambda daemon=daemon: daemon.sessions() == daemon.leases() == 0, limit_s=LIMIT_S
            )
        check_nothing_left(cluster, job)


def test_a_job_brings_its_own_daemons(
    cluster: Slurm, moto_server: MotoS3, urls: str, out: Path
) -> None:
    """PyTorch reads every sample once an epoch; the daemons go, and the cache stays."""
    env = own_daemon_env(cluster, moto_server) | {"KEEP_CACHE": f"{cluster.node_disk}/kept"}
    job = cluster.submit(
        "own-daemon.sbatch",
        sys.executable,
        EXAMPLES / "with_torchrun.py",
        urls,
        "--out",
        out / "keys",
        env=env,
    )
    assert job.wait() == "COMPLETED", job.said()
    epochs = reports(out / "keys")
    assert len(epochs) == 3
    for ranks in epochs.values():
        assert sorted(key for batches in ranks for batch in batches for key in batch) == KEYS
    for node in NODES:
        assert list((cluster.disk(node) / "kept").rglob("*.tar"))
    check_nothing_left(cluster, job)


def test_a_cancelled_job_takes_its_own_daemons_with_it(
    cluster: Slurm, moto_server: MotoS3, urls: str, out: Path
) -> None:
    """After scancel neither daemon nor cache is left on any node."""
    env = own_daemon_env(cluster, moto_server)
    job = cluster.submit("own-daemon.sbatch", sys.executable, JOB, urls, out, "hold", env=env)
    wait_until_all_hold(job, out)
    job.cancel()
    assert job.wait() == "CANCELLED"
    check_nothing_left(cluster, job)


def test_tasks_on_nodes_without_a_daemon_share_a_private_one(
    cluster: Slurm, moto_server: MotoS3, urls: str, out: Path
) -> None:
    """The first task to read starts it in the job's scratch; it ends after the job."""
    for node in NODES:
        (cluster.disk(node) / "run").mkdir(mode=0o700)
        (cluster.disk(node) / "scratch").mkdir()
    variables = {
        "XDG_RUNTIME_DIR": cluster.node_disk / "run",
        "SLURM_TMPDIR": cluster.node_disk / "scratch",
    }
    variables |= {"SHARDCACHE_SOCKET": "", "SHARDCACHE_CONFIG": "", "SHARDCACHE_IDLE_EXIT_S": 10}
    variables |= {"SHARDCACHE_MIN_FREE": 0, **moto_server.env()}
    given = [f"{name}={value}" for name, value in variables.items()]
    job = cluster.submit("site-daemon.sbatch", "env", *given, sys.executable, JOB, urls, out)
    assert job.wait() == "COMPLETED", job.said()
    check_epochs(out)
    for node in NODES:
        (cache,) = (cluster.disk(node) / "scratch").glob("shardcache-*/*/shards")
        assert list(cache.rglob("*.tar"))
    eventually(lambda: cluster.processes() == [], limit_s=LIMIT_S)


def test_a_job_whose_daemons_do_not_start_ends(
    cluster: Slurm, moto_server: MotoS3, urls: str, out: Path
) -> None:
    """It says in which log the reason is, and does not wait for what will never come."""
    env = own_daemon_env(cluster, moto_server) | {"SHARDCACHE_PART_SIZE": "much"}
    job = cluster.submit("own-daemon.sbatch", sys.executable, JOB, urls, out, env=env)
    assert job.wait() == "FAILED"
    assert f"shardcache-{job.number}-*.log" in job.said()
    logs = (cluster.root / "scripts").glob(f"shardcache-{job.number}-*.log")
    assert "SHARDCACHE_PART_SIZE" in "".join(log.read_text() for log in logs)
    check_nothing_left(cluster, job)


def test_prolog_and_epilog_cost_no_node(cluster: Slurm) -> None:
    """A job runs even without a daemon, and leftovers of killed ones go with it."""
    folder = f"{cluster.node_disk}/shardcache-$SLURM_JOB_ID"
    told = cluster.run(
        "srun",
        "--nodes=2",
        "sh",
        "-c",
        f'mkdir "{folder}" && touch "{folder}/left"; echo $SHARDCACHE_SOCKET',
    )
    assert told.split() == [f"{cluster.node_disk}/s.sock"] * len(NODES)
    for node in NODES:
        eventually(
            lambda node=node: not list(cluster.disk(node).glob("shardcache-*")), limit_s=LIMIT_S
        )
        assert (cluster.disk(node) / "told-to-start").exists()
        assert "no daemon answers" in (cluster.disk(node) / "told").read_text()
    eventually(
        lambda: cluster.node_states() == ["idle"] * len(NODES), limit_s=LIMIT_S, pause_s=PAUSE_S
    )
