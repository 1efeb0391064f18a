"""The Dockerfile built for real, and the DaemonSet's container run of what came out."""

import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.cluster.cluster import ONCE
from support.cluster.network import Network
from support.cluster.node import Store
from support.cluster.tier_cluster import BUCKET, TierCluster, fetch
from support.platforms.images import BuiltImage, build, why_not_built
from support.platforms.pods import Node, Pod, why_no_network, why_not
from support.platforms.rendered import KUBERNETES, by_kind, kustomized
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

WHY_NOT = why_not() or why_not_built()
WHY_NO_NETWORK = why_no_network()

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(4000),  # it downloads a Debian and all that the daemon needs
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
SMALL_BYTES = 120_000_000  # docs/deploy-kubernetes.md says 110 MB
TIER_BYTES = 30_000_000  # it says 25 MB


@pytest.fixture(scope="module")
def images() -> Iterator[tuple[BuiltImage, BuiltImage]]:
    """Contents of the images; gigabytes while they are made, so nothing of them is kept, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        yield build(Path(folder))


@pytest.fixture
def image(images: tuple[BuiltImage, BuiltImage]) -> BuiltImage:
    """The image that is built where no target is named."""
    return images[0]


@pytest.fixture
def tier_image(images: tuple[BuiltImage, BuiltImage]) -> BuiltImage:
    return images[1]


def test_the_image_is_small_and_not_roots(image: BuiltImage) -> None:
    """It runs the daemon as its own user, without the tools that made it, and adds no more than the docs say."""
    assert (image.config["User"], image.config["Entrypoint"], image.config["Cmd"]) == (
        "52780:52780",
        ["shardcache"],
        ["serve"],
    )
    added = image.root / "opt" / "shardcache"
    assert size_bytes(added) <= SMALL_BYTES
    assert not list(added.rglob("pip"))
    assert not (image.root / "src").exists()
    assert not (image.root / "wheels").exists()
    assert not (image.root / "usr/sbin/nginx").exists()
    assert not list(added.rglob("cryptography"))


def test_the_tiers_adds_nginx_and_the_certificates_alone(image: BuiltImage, tier_image: BuiltImage) -> None:
    """It is the daemon's in all that it says, and adds no more than the docs say."""
    assert tier_image.config == image.config
    assert (tier_image.root / "usr/sbin/nginx").exists()
    grown = size_bytes(tier_image.root) - size_bytes(image.root)
    assert 0 < grown <= TIER_BYTES


def test_the_daemonset_runs_on_it(image: BuiltImage, moto_server: MotoS3, tmp_path: Path) -> None:
    """As the manifests confine it, it prepares its folders, starts, fetches, answers its probes, and ends well."""
    moto_server.make_bucket("image")
    url = moto_server.put("image", "a.tar", make_tar(random_samples(10)))
    objects = kustomized(KUBERNETES / "base")
    spec = by_kind(objects)["DaemonSet"]["spec"]["template"]["spec"]
    given = {
        thing["metadata"]["name"]: {"shardcache.toml": 'capacity = "1GB"\nmin_free = "0%"\n'}
        for thing in objects
        if thing["kind"] == "ConfigMap"
    }
    node = Node(tmp_path / "node", "127.0.0.1", given | {"shardcache-credentials": moto_server.env()})
    with Pod("image", spec, node, image, image.env).start() as container:
        container.wait_until_started()
        warmed = container.exec("shardcache", "warm", url, "--json")
        assert warmed.returncode == 0, warmed.stdout + warmed.stderr
        assert json.loads(container.exec("shardcache", "status", "--json").stdout)["cache"]["shards"] == 1
        assert container.probe("readiness")
        assert container.probe("liveness")
        container.signal(signal.SIGTERM)
        assert container.wait() == 0, container.log()


@pytest.mark.skipif(WHY_NO_NETWORK is not None, reason=WHY_NO_NETWORK or "")
def test_the_tier_runs_on_its_own(tier_image: BuiltImage, tmp_path: Path) -> None:
    """Two nodes fetch one copy, their containers end well, and certificates can be made in it."""
    with Network() as net, Store(net.add(100), tmp_path) as store:
        dataset = store.fill(BUCKET, 4, 2 * 1024 * 1024)
        cluster = TierCluster(tmp_path, net, store, 2, tier_image, tier_image.env)
        cluster.certify()
        cluster.list_nodes(cluster.nodes)
        with ExitStack() as stack:
            pods = [stack.enter_context(cluster.pod(node)) for node in cluster.nodes]
            containers = [container for pod in pods for container in pod.containers.values()]
            for container in containers:
                container.wait_until_started()
            before_bytes = store.host.sent_bytes()
            fetch(pods, dataset)
            assert store.host.sent_bytes() - before_bytes <= ONCE * dataset.size_bytes
            tier = pods[0].containers["tier"]
            made = tier.exec("shardcache", "cluster", "certificates", "--shared", "--out", "/run/shardcache-tier/new")
            assert made.returncode == 0, made.stderr
            for container in containers:
                container.signal(signal.SIGTERM)
            assert [container.wait() for container in containers] == [0] * 4


def size_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))
