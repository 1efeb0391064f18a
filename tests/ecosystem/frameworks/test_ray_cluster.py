"""`shardcache_client.ray` on a Ray cluster of two local nodes: Ray Data, and Train's ranks."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="`make ecosystem` installs it")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402

from shardcache.errors import ConfigError, NoDaemonError  # noqa: E402
from shardcache.shared.unix_socket import cached_urls  # noqa: E402
from shardcache_client.ray import read_shards  # noqa: E402
from support.programs.cli import clean_environment, shardcache  # noqa: E402
from support.programs.daemon import Daemon, private_home  # noqa: E402
from support.programs.examples import EXAMPLES  # noqa: E402
from support.programs.guard import GUARD_S  # noqa: E402
from support.shards.reading import keys_of  # noqa: E402
from support.shards.tars import make_tar, random_samples, write_shards  # noqa: E402
from support.stores.buckets import MotoS3  # noqa: E402

SHARDS = 8
SAMPLES = 5
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


class TwoNodes:
    """A cluster of two nodes with a CPU and a socket each, and this process as its driver.

    Attributes:
        daemons: those of the nodes, not yet started.
    """

    def __init__(self, folder: Path, server: MotoS3) -> None:
        self.daemons = []
        for name in ("head", "other"):
            (folder / name).mkdir()
            self.daemons.append(Daemon(folder / name, env=server.env()))
        head, other = (self._node(daemon) for daemon in self.daemons)
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**head, "include_dashboard": False}
        )
        self._other = self._cluster.add_node(**other)
        ray.init(address=self._cluster.address, logging_level="ERROR")

    def _node(self, daemon: Daemon) -> dict[str, Any]:
        env = {"SHARDCACHE_SOCKET": str(daemon.socket)}
        return {"num_cpus": 1, "object_store_memory": 80_000_000, "env_vars": env}

    def start_daemons(self) -> None:
        for daemon in self.daemons:
            daemon.start()

    def kill_other(self) -> None:
        """Kill the processes of the node that is not the head."""
        self._cluster.remove_node(self._other, allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        for daemon in self.daemons:
            daemon.kill()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for Ray's sockets and the daemons': pytest's may have too long a path."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        monkeypatch.setenv("RAY_TMPDIR", name)
        yield Path(name)


@pytest.fixture
def cluster(moto_server: MotoS3, folder: Path) -> Iterator[TwoNodes]:
    made = TwoNodes(folder, moto_server)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def urls(moto_server: MotoS3) -> str:
    moto_server.make_bucket("ray")
    for number in range(SHARDS):
        samples = random_samples(SAMPLES, {"jpg": 100}, first=number * SAMPLES)
        tar = make_tar(
            [{**sample, "cls": str(place).encode()} for place, sample in enumerate(samples)]
        )
        moto_server.put("ray", f"{number}.tar", tar)
    return "s3://ray/{0..7}.tar"


def test_shards_are_read_where_they_are_cached(cluster: TwoNodes, urls: str) -> None:
    """Each node reads what it has, and nothing is fetched twice until a node is killed."""
    with pytest.raises(NoDaemonError, match="none of the 2 nodes"):
        read_shards(urls)
    with pytest.raises(ConfigError, match="on_error is 'sometimes'"):
        read_shards(urls, on_error="sometimes")
    cluster.start_daemons()
    early = {f"s3://ray/{number}.tar" for number in range(SHARDS // 2)}
    late = {f"s3://ray/{number}.tar" for number in range(SHARDS // 2, SHARDS)}
    assert shardcache("warm", *early, socket=cluster.daemons[0].socket).code == 0

    def cached() -> list[set[str]]:
        return [set(cached_urls(daemon.socket, GUARD_S)) for daemon in cluster.daemons]

    rows = read_shards(urls).take_all()
    assert sorted(keys_of(rows)) == KEYS
    assert all(len(row["jpg"]) == 100 and row["__url__"].startswith("s3://ray/") for row in rows)
    assert cached() == [early, late]
    assert sorted(keys_of(read_shards(urls).take_all())) == KEYS
    assert cached() == [early, late]

    planned = read_shards(urls)
    cluster.kill_other()
    assert sorted(keys_of(planned.take_all())) == KEYS
    assert len(cached()[0]) == SHARDS


def test_the_example_reads_each_epoch(moto_server: MotoS3, folder: Path, urls: str) -> None:
    """The docs' script, on a cluster that it starts itself, reads all samples each epoch."""
    with Daemon(folder, env=moto_server.env()) as daemon:
        env = clean_environment({"SHARDCACHE_SOCKET": str(daemon.socket)})
        command = [sys.executable, "with_ray_data.py", urls]
        done = subprocess.run(
            command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=GUARD_S
        )
    assert done.returncode == 0, done.stderr
    said = f"{SHARDS * SAMPLES} samples, labels from 0 to {SAMPLES - 1}"
    assert done.stdout.splitlines()[-2:] == [f"epoch 0: {said}", f"epoch 1: {said}"]


def test_ray_train_without_torchs_process_group(
    cluster: TwoNodes, urls: str, tmp_path: Path
) -> None:
    """Workers that know their rank from Ray alone read a share each, in loader workers, too."""
    cluster.start_daemons()

    def train(config: dict[str, Any]) -> None:
        from torch.utils.data import DataLoader

        from shardcache_client.dataset import ShardDataset

        rank = ray.train.get_context().get_world_rank()
        loader = DataLoader(
            ShardDataset(urls, even=None), batch_size=None, num_workers=config["workers"]
        )
        (tmp_path / f"{config['workers']}-{rank}").write_text(
            "\n".join(sample["__key__"] for sample in loader)
        )

    for workers in (0, 1):
        scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
        run = ray.train.RunConfig(name="ranks", storage_path=str(tmp_path / "storage"))
        DataParallelTrainer(
            train, train_loop_config={"workers": workers}, scaling_config=scaling, run_config=run
        ).fit()
        shares = [(tmp_path / f"{workers}-{rank}").read_text().split() for rank in range(2)]
        assert all(shares)
        assert sorted(shares[0] + shares[1]) == KEYS


def test_tasks_on_a_node_without_a_daemon_share_a_private_one(folder: Path) -> None:
    """Two tasks at a time share it, and it outlives the cluster's processes for the next job."""

    @ray.remote(num_cpus=1)
    def read(urls: str) -> tuple[list[str], list[str]]:
        from shardcache.shared.private import PrivatePlace
        from shardcache_client.reader import ShardReader

        keys = [sample["__key__"] for sample in ShardReader(urls)]
        return keys, list(map(str, PrivatePlace.find().running_sockets()))

    (folder / "data").mkdir()
    write_shards(folder / "data", SHARDS, SAMPLES)
    with private_home(folder) as home:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80_000_000,
            logging_level="ERROR",
        )
        try:
            told = ray.get([read.remote(f"{folder}/data/") for _ in range(2)])
        finally:
            ray.shutdown()
        assert [keys for keys, _ in told] == [KEYS, KEYS]
        assert [sockets for _, sockets in told] == [list(map(str, home.running()))] * 2
        assert len(home.running()) == 1
