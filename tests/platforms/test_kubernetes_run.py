"""Daemons and a training job on two nodes, run and confined as the very manifests say."""

import json
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.platforms.images import HostImage
from support.platforms.pods import Container, Node, Pod, check_confined, why_not
from support.platforms.rendered import KUBERNETES, by_kind, kustomized
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

WHY_NOT = why_not()

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
SHARDS = 6
SAMPLES = 40
URLS = "s3://training-data/train/{000000..000005}.tar"
TOKEN = "0123456789abcdef0123456789abcdef"
IMAGE = {"shardcache": "shardcache", "python": "", "torchrun": "torch.distributed.run"}
ENV = {"PATH": "/image:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
NOWHERE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
}


class Cluster:
    """Objects applied to the cluster: the site's manifests and the secrets made by hand."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._site = kustomized(KUBERNETES / "examples" / "site")
        self._job = kustomized(KUBERNETES / "examples" / "training")
        self.image = HostImage(root / "image", IMAGE, "shardcache")

    def node(self, number: int, credentials: Mapping[str, str]) -> Node:
        """Return a node of its own address, whose daemon has these credentials."""
        objects = {
            thing["metadata"]["name"]: dict(thing["data"])
            for thing in (*self._site, *self._job)
            if thing["kind"] == "ConfigMap"
        }
        for data in objects.values():
            # The example's disk is larger than this machine's.
            data.update(
                {
                    file: text.replace("3TB", "1GB").replace('"5%"', '"0%"')
                    for file, text in data.items()
                }
            )
        objects |= {
            "shardcache-credentials": dict(credentials),
            "shardcache-metrics": {"token": TOKEN},
        }
        return Node(self._root / f"node-{number}", f"127.83.7.{number}", objects)

    @contextmanager
    def daemon(self, node: Node, name: str = "shardcache") -> Iterator[Container]:
        """Yield the DaemonSet's container on a node, once its startup probe has succeeded."""
        template = by_kind(self._site)["DaemonSet"]["spec"]["template"]
        with Pod(name, template["spec"], node, self.image, ENV) as pod:
            (container,) = pod.containers.values()
            container.wait_until_started()
            yield container

    @contextmanager
    def trainer(self, node: Node, index: int) -> Iterator[Container]:
        """Yield the container of the Job's pod with this index, with one process, not eight."""
        spec = by_kind(self._job)["Job"]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        env = [variable for variable in container["env"] if variable["name"] != "GPUS"]
        fewer = {**container, "env": [{"name": "GPUS", "value": "1"}, *env]}
        given = ENV | {"JOB_COMPLETION_INDEX": str(index)}
        with Pod(f"train-{index}", {**spec, "containers": [fewer]}, node, self.image, given) as pod:
            yield from pod.containers.values()


@pytest.fixture(scope="module")
def store() -> Iterator[MotoS3]:
    """An S3 server with the bucket that the example trains on."""
    with MotoS3() as s3:
        s3.make_bucket("training-data")
        for n in range(SHARDS):
            samples = random_samples(SAMPLES, {"jpg": 3000}, seed=n, first=n * SAMPLES)
            labelled = [{**sample, "cls": b"%d" % (k % 10)} for k, sample in enumerate(samples)]
            s3.put("training-data", f"train/{n:06d}.tar", make_tar(labelled))
        yield s3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, store: MotoS3) -> Iterator[dict[Node, Container]]:
    first, second = (cluster.node(number, store.env()) for number in (1, 2))
    with cluster.daemon(first) as one, cluster.daemon(second) as two:
        yield {first: one, second: two}


def status(daemon: Container) -> Any:
    """Return what `shardcache status --json` says within the container."""
    return json.loads(daemon.exec("shardcache", "status", "--json").stdout)


def test_the_daemon_is_confined(nodes: dict[Node, Container]) -> None:
    """The daemon has its own user, seccomp and no capability, and writes only its cache."""
    check_confined(next(iter(nodes.values())), "/var/cache/shardcache")


def test_a_job_on_two_nodes_trains(
    cluster: Cluster, nodes: dict[Node, Container], store: MotoS3
) -> None:
    """Both pods read every sample between them, and each node fetches each byte once."""
    (first, second) = nodes
    daemons = list(nodes.values())
    index = daemons[0].exec(
        "sh", "-c", f"shardcache index '{URLS}' -o /tmp/index.json && cat /tmp/index.json"
    )
    store.put("training-data", "train/index.json", index.stdout[index.stdout.index("{") :].encode())
    with cluster.trainer(first, 0) as leader, cluster.trainer(second, 1) as other:
        assert leader.wait() == 0, leader.log()
        assert other.wait() == 0, other.log()
        assert f"epoch 1: {SHARDS * SAMPLES} samples on 2 ranks" in leader.log()
    listed = store.client.list_objects_v2(Bucket="training-data")["Contents"]
    for daemon in daemons:
        found = status(daemon)
        assert found["cache"]["shards"] > 0
        counters = found["counters"]
        assert counters["origin_bytes"] - counters["hedged_bytes"] <= sum(
            thing["Size"] for thing in listed
        )


def test_metrics_need_the_token(nodes: dict[Node, Container]) -> None:
    """The pod's address gives metrics to the PodMonitor's token."""
    node = next(iter(nodes))
    request = urllib.request.Request(
        f"http://{node.ip}:9300/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"shardcache_" in answer.read()


def test_a_daemon_that_hangs_is_found(nodes: dict[Node, Container]) -> None:
    """The liveness probe fails while the daemon answers nobody, and succeeds again once it does."""
    daemon = next(iter(nodes.values()))
    assert daemon.probe("liveness")
    assert daemon.probe("readiness")
    daemon.signal(signal.SIGSTOP)
    try:
        assert not daemon.probe("liveness")
    finally:
        daemon.signal(signal.SIGCONT)
    assert daemon.probe("liveness")


def test_a_new_pod_serves_what_the_old_one_cached(cluster: Cluster, store: MotoS3) -> None:
    """SIGTERM ends a pod well; the next is live and ready though no store answers."""
    node = cluster.node(3, store.env())
    with cluster.daemon(node, "old") as old:
        assert old.exec("shardcache", "warm", URLS).returncode == 0
        old.signal(signal.SIGTERM)
        assert old.wait() == 0, old.log()
    with cluster.daemon(cluster.node(3, NOWHERE), "new") as new:
        assert new.probe("liveness")
        assert new.probe("readiness")
        assert status(new)["cache"]["shards"] == SHARDS


def test_a_pod_waits_for_the_daemon(cluster: Cluster, store: MotoS3) -> None:
    """The job's pod neither starts nor makes a folder in the absent daemon's place."""
    node = cluster.node(4, store.env())
    with pytest.raises(FileNotFoundError), cluster.trainer(node, 0):
        pytest.fail("the pod has started")
    assert not node.path("/run/shardcache").exists()
