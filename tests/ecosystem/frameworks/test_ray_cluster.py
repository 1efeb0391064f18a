"""`shardcache_client.ray` on a Ray cluster of two nodes on this machine: daemons, Ray Data, Ray Train's ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="`make ecosystem` installs it")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402

from shardcache.errors import DaemonError, NoDaemonError  # noqa: E402
from shardcache.unix_socket import cached_urls  # noqa: E402
from shardcache_client.ray import Daemons, read_shards, start_daemons  # noqa: E402
from support.cluster.tier_nodes import TierNodes, needs_nginx  # noqa: E402
from support.network.ports import free_port  # noqa: E402
from support.programs.cli import clean_environment, shardcache  # noqa: E402
from support.programs.daemon import eventually  # noqa: E402
from support.programs.examples import EXAMPLES  # noqa: E402
from support.programs.guard import GUARD_S  # noqa: E402
from support.shards.tars import make_tar, random_samples  # noqa: E402
from support.stores.moto_s3 import MotoS3  # noqa: E402
from support.stores.throttled_s3 import ThrottledS3  # noqa: E402

SHARDS, SAMPLES = 8, 5
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


class TwoNodes:
    """A cluster of two nodes with a CPU each, and this process as its driver.

    Attributes:
        folder: of the daemons' sockets and caches.
        second: the node that is not the head.
    """

    def __init__(self, folder: Path, server: MotoS3) -> None:
        self.folder = folder
        self._env = server.env()
        self._node = {"num_cpus": 1, "object_store_memory": 80_000_000}
        self._cluster = Cluster(initialize_head=True, head_node_args={**self._node, "include_dashboard": False})
        self.second = self.add()
        self.connect()

    def connect(self) -> None:
        """Begin a job."""
        ray.init(address=self._cluster.address, logging_level="ERROR")

    def add(self) -> Any:
        """Add a node."""
        return self._cluster.add_node(**self._node)

    def kill(self, node: Any) -> None:
        """Kill a node's processes."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End the job, then the cluster."""
        ray.shutdown()
        self._cluster.shutdown()

    def start_daemons(self, *flags: str, env: Mapping[str, str] | None = None, **options: Any) -> Daemons:
        """Start daemons with a folder and a socket for each node."""
        where = {"cache_dir": self.folder / "{node}", "socket": self.folder / "{node}.sock"}
        env = {**self._env, **(env or {})}
        return start_daemons(capacity="1GB", flags=("--min-free", "0", *flags), env=env, **where, **options)


@pytest.fixture
def cluster(moto_server: MotoS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    """The cluster; everything of it is gone afterwards."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        made = TwoNodes(Path(folder), moto_server)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def urls(moto_server: MotoS3) -> str:
    """Eight shards with five samples each."""
    moto_server.make_bucket("ray")
    for number in range(SHARDS):
        samples = random_samples(SAMPLES, {"jpg": 100}, first=number * SAMPLES)
        tar = make_tar([{**sample, "cls": str(place).encode()} for place, sample in enumerate(samples)])
        moto_server.put("ray", f"{number}.tar", tar)
    return "s3://ray/{0..7}.tar"


def pids(daemons: Daemons) -> dict[str, int]:
    """Return the process of each node's daemon."""
    return {node: each["pid"] for node, each in daemons.ready().items()}


def is_gone(pid: int) -> bool:
    """Return True if there is no such process."""
    return not Path(f"/proc/{pid}").exists()


def parent(pid: int) -> int:
    """Return the process that started another."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("PPid:")]
    return int(line.split()[1])


def is_other(current: Callable[[], int], pid: int) -> Callable[[], bool]:
    """Return a condition: another process has taken the place of one."""
    return lambda: current() != pid


def test_a_daemon_per_node_as_long_as_the_job(cluster: TwoNodes) -> None:
    """Each node has one, also a node that joins; killed ones are replaced; none outlives its actor, node or job."""
    daemons = cluster.start_daemons()
    first = pids(daemons)
    assert len(set(first.values())) == 2
    node, victim = next(iter(first.items()))
    os.kill(victim, 9)
    eventually(is_other(lambda: pids(daemons)[node], victim))

    victim = pids(daemons)[node]
    os.kill(parent(victim), 9)  # the actor's process, as Ray does when memory runs out
    eventually(lambda: is_gone(victim))
    eventually(is_other(lambda: pids(daemons)[node], victim))

    third = cluster.add()
    eventually(lambda: len(pids(daemons)) == 3)
    before = pids(daemons)
    actor = parent(before[third.node_id])
    for process in (parent(actor), actor):  # as `ray stop --force`: no process of Ray is left to end the daemon
        os.kill(process, 9)
    cluster.kill(third)
    eventually(lambda: is_gone(before[third.node_id]))
    eventually(lambda: pids(daemons) == {node: pid for node, pid in before.items() if node != third.node_id})

    ray.shutdown()
    eventually(lambda: all(map(is_gone, before.values())))


def test_daemons_of_the_cluster_outlive_the_job_that_started_them(cluster: TwoNodes) -> None:
    """The next job finds the same ones and can stop them; what they did not stop, the cluster's end does."""
    running = pids(cluster.start_daemons(lifetime="cluster"))
    ray.shutdown()
    cluster.connect()
    found = cluster.start_daemons()
    assert pids(found) == running
    found.stop()
    assert all(map(is_gone, running.values()))
    again = pids(cluster.start_daemons(lifetime="cluster"))
    cluster.close()
    eventually(lambda: all(map(is_gone, again.values())))


def test_a_daemon_that_cannot_start_is_an_error(cluster: TwoNodes, urls: str) -> None:
    """A wrong option is reported by the call that gave it, and leaves nothing that keeps trying."""
    with pytest.raises(DaemonError, match="ended with status 2 before it was ready"):
        cluster.start_daemons("--capacitty", "1GB")
    with pytest.raises(NoDaemonError, match="none of the 2 nodes"):
        read_shards(urls)
    assert len(pids(cluster.start_daemons())) == 2


def test_shards_are_read_where_they_are_cached(cluster: TwoNodes, urls: str) -> None:
    """A node reads what it has, the other what neither has; nothing is fetched twice until a node is killed."""
    daemons = cluster.start_daemons()
    first, _ = daemons.ready().values()
    early = [f"s3://ray/{number}.tar" for number in range(SHARDS // 2)]
    assert shardcache("warm", *early, socket=Path(first["socket"])).code == 0

    def cached() -> dict[str, set[str]]:
        return {node: set(cached_urls(Path(each["socket"]), GUARD_S)) for node, each in daemons.ready().items()}

    rows = read_shards(urls).take_all()
    assert sorted(row["__key__"] for row in rows) == KEYS
    assert all(len(row["jpg"]) == 100 and row["__url__"].startswith("s3://ray/") for row in rows)
    held = cached()
    assert sorted(held.values(), key=min) == [set(early), {f"s3://ray/{n}.tar" for n in range(SHARDS // 2, SHARDS)}]
    assert sorted(row["__key__"] for row in read_shards(urls).take_all()) == KEYS
    assert cached() == held

    planned = read_shards(urls)
    cluster.kill(cluster.second)
    assert sorted(row["__key__"] for row in planned.take_all()) == KEYS
    (left,) = cached().values()
    assert len(left) == SHARDS


@needs_nginx
def test_nodes_with_a_tier_take_one_copy_from_the_store(cluster: TwoNodes, tmp_path: Path) -> None:
    """Daemons that are given a tier by their environment, as in docs/cluster.md, share what one of them has fetched."""
    (tmp_path / "data").mkdir()
    shards = [tmp_path / "data" / f"{number}.tar" for number in range(SHARDS)]
    for shard in shards:
        shard.write_bytes(make_tar(random_samples(20)))
    with ThrottledS3(tmp_path, first_byte_s=0.0) as store, TierNodes([store.endpoint_url], 2) as tier:
        # Both nodes of Ray are this machine, and with it one node of the tier.
        tables = json.dumps([{"match": "s3://", "tier": tier.front(tier.tier.nodes[0])}])
        daemons = cluster.start_daemons(env=store.env() | {"SHARDCACHE_ORIGIN": tables})
        for each in daemons.ready().values():
            ran = shardcache("warm", f"s3://data/{{0..{SHARDS - 1}}}.tar", socket=Path(each["socket"]))
            assert ran.code == 0, ran.err
        extra_bytes = store.stats().sent_bytes - sum(shard.stat().st_size for shard in shards)
        assert 0 <= extra_bytes < shards[0].stat().st_size
        assert all(map(tier.cached, tier.tier.nodes))


@needs_nginx
def test_the_example_of_a_tier_takes_one_copy_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of the docs starts nginx on each of two nodes, and leaves none; a second job reads from the tier."""
    (tmp_path / "data").mkdir()
    shards = [tmp_path / "data" / f"{number}.tar" for number in range(SHARDS)]
    for shard in shards:
        shard.write_bytes(make_tar(random_samples(20)))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        ThrottledS3(tmp_path, first_byte_s=0.0) as store,
    ):
        for name, value in {**store.env(), "RAY_TMPDIR": folder, "SHARDCACHE_MIN_FREE": "0"}.items():
            monkeypatch.setenv(name, value)
        node = {"num_cpus": 1, "object_store_memory": 80_000_000}
        head = {**node, "node_ip_address": "127.0.0.2", "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**node, node_ip_address="127.0.0.3")
            ports = ["--front", f"{{address}}:{free_port()}", "--owner-port", str(free_port())]
            ports += ["--min-free", "1", *(["--user", "root"] if os.geteuid() == 0 else [])]
            tier = ["--tier-dir", f"{folder}/{{node}}-tier", "--run-dir", f"{folder}/{{node}}-run"]
            for job in ("first", "second"):  # with daemons' caches of its own
                own = ["--cache-dir", f"{folder}/{{node}}-{job}", "--socket", f"{folder}/{{node}}.sock"]
                command = [sys.executable, "with_ray_tier.py", f"s3://data/{{0..{SHARDS - 1}}}.tar"]
                command += ["--store", store.endpoint_url, "--capacity", "1GB", *own, *tier, *ports]
                env = clean_environment({"RAY_ADDRESS": cluster.address})
                done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=GUARD_S)
                assert done.returncode == 0, done.stderr
                assert f"{SHARDS * 20} samples, read on 2 nodes" in done.stdout
                eventually(lambda: not processes_of(folder, "nginx"))
            extra_bytes = store.stats().sent_bytes - sum(shard.stat().st_size for shard in shards)
            assert 0 <= extra_bytes < shards[0].stat().st_size
            for own_part in Path(folder).glob("*-tier"):
                assert any(path.is_file() for path in (own_part / "parts").rglob("*"))
            assert len(list(Path(folder).glob("*-tier"))) == 2
        finally:
            cluster.shutdown()


def processes_of(folder: str, program: str) -> list[int]:
    """Return the processes of a program whose command names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:  # it has ended
            continue
        if program in command and folder in command:
            found.append(int(path.parent.name))
    return found


def test_the_example_reads_each_epoch(moto_server: MotoS3, urls: str, tmp_path: Path) -> None:
    """The script of the docs, on a cluster that it starts itself, reads every sample in both epochs."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        env = {**moto_server.env(), "RAY_TMPDIR": folder, "SHARDCACHE_SOCKET": f"{folder}/s.sock"}
        env |= {"SHARDCACHE_MIN_FREE": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "with_ray_data.py", urls, "--cache-dir", str(tmp_path), "--capacity", "1GB"]
        done = subprocess.run(
            command, cwd=EXAMPLES, env=clean_environment(env), capture_output=True, text=True, timeout=GUARD_S
        )
        assert done.returncode == 0, done.stderr
        said = f"{SHARDS * SAMPLES} samples, labels from 0 to {SAMPLES - 1}"
        assert done.stdout.splitlines()[-2:] == [f"epoch 0: {said}", f"epoch 1: {said}"]


def test_ray_train_without_torchs_process_group(cluster: TwoNodes, urls: str, tmp_path: Path) -> None:
    """Workers that know their rank from Ray alone read a share each, in loader workers, too."""
    cluster.start_daemons()

    def train(config: dict[str, Any]) -> None:
        from torch.utils.data import DataLoader

        from shardcache_client import ShardDataset
        from shardcache_client.ray import node_socket

        rank = ray.train.get_context().get_world_rank()
        dataset = ShardDataset(urls, socket=node_socket(), even=None)
        loader = DataLoader(dataset, batch_size=None, num_workers=config["workers"])
        (tmp_path / f"{config['workers']}-{rank}").write_text("\n".join(sample["__key__"] for sample in loader))

    for workers in (0, 1):
        scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
        run = ray.train.RunConfig(name="ranks", storage_path=str(tmp_path / "storage"))
        DataParallelTrainer(train, train_loop_config={"workers": workers}, scaling_config=scaling, run_config=run).fit()
        shares = [(tmp_path / f"{workers}-{rank}").read_text().split() for rank in range(2)]
        assert all(shares)
        assert sorted(shares[0] + shares[1]) == KEYS
