"""The tier on three nodes, run from the very manifests, with a network for each pod."""

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shardcache.cluster.node_list import parse
from shardcache.cluster.tier_config import Tier
from support.cluster.cluster import NOTHING, ONCE
from support.cluster.network import Network
from support.cluster.node import Dataset, Store
from support.cluster.tier import OWNER_PORT
from support.cluster.tier_cluster import (
    BUCKET,
    NODES,
    SECRET,
    TierCluster,
    evict,
    fetch,
    tier_status,
)
from support.cluster.tier_nodes import needs_nginx
from support.platforms.images import HostImage
from support.platforms.pods import Pod, check_confined, why_no_network, why_not
from support.programs.daemon import eventually
from support.programs.processes import children

WHY_NOT = why_not() or why_no_network()

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(900),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    needs_nginx,
]
MIB = 1024 * 1024
ENV = {"PATH": "/image:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierCluster]:
    """Four nodes, of which three are to have a tier."""
    with Network() as net, Store(net.add(100)) as store:
        root = tmp_path_factory.mktemp("cluster")
        image = HostImage(root / "image", {"shardcache": "shardcache", "python": ""}, "shardcache")
        running = TierCluster(root, net, store, 4, image, ENV)
        running.certify()
        running.list_nodes(running.nodes[:3])
        yield running


@pytest.fixture(scope="module")
def dataset(cluster: TierCluster) -> Dataset:
    return cluster.store.fill(BUCKET, 12, 2 * MIB)


@pytest.fixture(scope="module")
def pods(cluster: TierCluster) -> Iterator[list[Pod]]:
    """A pod on each of the first three nodes."""
    with ExitStack() as stack:
        running = [stack.enter_context(cluster.pod(node)) for node in cluster.nodes[:3]]
        for pod in running:
            for container in pod.containers.values():
                container.wait_until_started()
        yield running


@pytest.fixture
def whole(cluster: TierCluster, pods: list[Pod], dataset: Dataset) -> list[Pod]:
    """The pods with the whole list, whose tier has the dataset."""
    relist(cluster, pods, 3)
    fetch(pods, dataset)
    evict(pods)
    return pods


def relist(cluster: TierCluster, pods: list[Pod], count: int) -> None:
    """Change the ConfigMap to the first nodes, and return when the tier follows it."""
    cluster.list_nodes(cluster.nodes[:count])
    for pod in pods:
        pod.volumes.sync()
    digest = Tier(nodes=parse(cluster.objects[NODES]["nodes"]), stores=()).digest
    eventually(
        lambda: [node["digest"] for node in tier_status(pods[0])["nodes"]] == [digest] * count,
        pause_s=0.5,
    )


def sent(cluster: TierCluster, pods: list[Pod], dataset: Dataset) -> float:
    """Fetch a dataset on all nodes at once; return the store's bytes in dataset sizes."""
    before_bytes = cluster.store.host.sent_bytes()
    fetch(pods, dataset)
    return (cluster.store.host.sent_bytes() - before_bytes) / dataset.size_bytes


def test_a_cold_epoch_takes_one_copy_from_the_store(
    cluster: TierCluster, pods: list[Pod], dataset: Dataset
) -> None:
    """All nodes fetch all of it at the same time; the second epoch takes nothing."""
    assert 0.99 <= sent(cluster, pods, dataset) <= ONCE
    eventually(lambda: _from_store_bytes(pods[0]) == dataset.size_bytes)
    evict(pods)
    assert sent(cluster, pods, dataset) <= NOTHING


def _from_store_bytes(pod: Pod) -> int:
    return sum(node["figures"]["from_store_bytes"] for node in tier_status(pod)["nodes"])


def test_both_containers_are_confined(pods: list[Pod]) -> None:
    """Daemon, nginx and starter run as their own user and write only to their folders."""
    for name, folder in (
        ("shardcache", "/var/cache/shardcache"),
        ("tier", "/var/cache/shardcache-tier"),
    ):
        check_confined(pods[0].containers[name], folder)
    kind = (
        pods[0]
        .containers["tier"]
        .exec("stat", "--file-system", "--format", "%T", "/run/shardcache-tier")
        .stdout
    )
    assert kind.strip() == "tmpfs", "signatures are in the names of its files"
    assert "alert" not in pods[0].containers["tier"].log()


def test_the_front_is_a_socket_of_the_pod_and_the_owner_the_clusters(
    cluster: TierCluster, pods: list[Pod]
) -> None:
    """Only the pod's containers have a front; the owner answers to certificates."""
    (one, two) = (node.host for node in cluster.nodes[:2])
    assert one is not None
    assert two is not None
    listening = pods[0].containers["tier"].exec("cat", "/proc/net/tcp").stdout.splitlines()[1:]
    ports = {
        int(line.split()[1].rpartition(":")[2], 16) for line in listening if line.split()[3] == "0A"
    }
    assert ports == {OWNER_PORT}
    with two.entered():
        assert ssl.get_server_certificate((one.address, OWNER_PORT))


def test_a_new_certificate_is_put_to_use(
    cluster: TierCluster, whole: list[Pod], dataset: Dataset
) -> None:
    """The nodes present the replaced Secret's certificate, and go on to share."""
    host = cluster.nodes[0].host
    assert host is not None

    def presented() -> str:
        with host.entered():
            return ssl.get_server_certificate((host.address, OWNER_PORT))

    former = cluster.objects[SECRET]["tls.crt"]
    assert presented().split() == former.split()
    cluster.certify()
    for pod in whole:
        pod.volumes.sync()
    eventually(
        lambda: presented().split() == cluster.objects[SECRET]["tls.crt"].split(), pause_s=0.5
    )
    assert presented().split() != former.split()
    assert sent(cluster, whole, dataset) <= NOTHING


def test_an_nginx_that_hangs_is_found(pods: list[Pod]) -> None:
    """The liveness probe fails while the workers are stopped, though connections are taken."""
    tier = pods[0].containers["tier"]
    (nginx,) = children(tier.state()["pid"])
    workers = children(nginx)
    assert tier.probe("liveness")
    assert tier.probe("readiness")
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        assert not tier.probe("liveness")
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    assert tier.probe("liveness")


def test_a_pod_whose_tier_does_not_start_reads_from_the_store(
    cluster: TierCluster, dataset: Dataset
) -> None:
    """The pod is ready, and the tier waits for the missing file that it names.

    So it does for a list that has the node.
    """
    listed = cluster.objects.pop(NODES)
    certificate = cluster.objects.pop(SECRET)
    try:
        with cluster.pod(cluster.nodes[3], "early") as pod:
            tier = pod.containers["tier"]
            for container in pod.containers.values():
                container.wait_until_started()
            assert tier.probe("readiness")
            assert "the list of nodes does not exist" in tier.log()
            assert 0.99 <= sent(cluster, [pod], dataset) <= ONCE
            cluster.objects |= {NODES: listed, SECRET: certificate}
            pod.volumes.sync()
            eventually(lambda: "waiting: gpu-4 is not among the nodes" in tier.log(), pause_s=0.5)
            assert tier.probe("readiness")
    finally:
        cluster.objects |= {NODES: listed, SECRET: certificate}
