"""The Dockerfile built for real, and the DaemonSet's container run of what came out."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import ROOT
from support.cluster.cluster import ONCE
from support.cluster.network import Network
from support.cluster.node import Store
from support.cluster.tier_cluster import BUCKET, TierCluster, fetch
from support.platforms.oci import Json, Mount
from support.platforms.pods import Node, Pod, why_no_network, why_not
from support.platforms.rendered import KUBERNETES, by_kind, kustomized
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

PROGRAMS = ("buildah", "mmdebstrap", "unshare")
BUILD_LIMIT_S = 1800
BASE = ("python3-venv", "python3-pip", "python-is-python3")
# What pip goes by where a site has a mirror, or a certificate authority, of its own.
SITES_OWN = ("/etc/ssl/certs", "/etc/pip.conf")
# All in a mount namespace of its own: what buildah mounts is gone with it, and so is what it
# remembers of layers below /var/lib, wherever its folders are. Arguments: the folder, the
# Dockerfile's, options. The tier's image begins with the steps that the daemon's has taken.
BUILD = """
folder=$0; context=$1; shift
mount -t tmpfs none /var/lib
with() { buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver overlay "$@"; }
base=$(with from scratch)
with add --quiet "$base" "$folder/base.tar" / >&2
with commit --quiet --rm "$base" localhost/base >&2
for target in daemon tier; do
    named="--target $target"
    [ $target != daemon ] || named=
    with build --layers --pull-never --isolation chroot --build-arg BASE=localhost/base "$@" \
        $named --tag "localhost/$target" "$context" >&2
    made=$(with from --pull-never "localhost/$target")
    cp --archive "$(with mount "$made")" "$folder/$target"
    with inspect --type image "localhost/$target" >"$folder/$target.json"
done
"""


def why_not_built() -> str | None:
    """Return why no image can be built here, or None."""
    if os.geteuid() != 0:
        return "to build an image takes root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"no {missing[0]} here: apt-get install buildah mmdebstrap" if missing else None


WHY_NOT = why_not() or why_not_built()
WHY_NO_NETWORK = why_no_network()

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(4000),  # it downloads a Debian and all that the daemon needs
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
SMALL_BYTES = 120_000_000  # docs/deploy-kubernetes.md says 110 MB
TIER_BYTES = 30_000_000  # it says 25 MB


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """Image of the Dockerfile on a Debian with Python, in place of the image that it names."""

    root: Path  # its files
    config: Json  # what it says of user, environment and command

    @property
    def entrypoint(self) -> str:
        return str(self.config["Entrypoint"][0])

    @property
    def env(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.config["Env"])

    def lay_out(self, folder: Path) -> Path:
        """Return the only copy: containers of this image have a read-only root."""
        return self.root

    def mounts(self) -> Iterator[Mount]:
        return iter(())


def build(folder: Path) -> tuple[BuiltImage, BuiltImage]:
    """Build the project's Dockerfile below a folder, with Debian's and Python's packages.

    Returns the image that is built where no target is named, and that of the target `tier`.

    Raises CalledProcessError where a step fails.
    """
    run_step(
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--include={','.join(BASE)}",
        "bookworm",
        folder / "base.tar",
    )
    own = [f"--volume={path}:{path}:ro" for path in SITES_OWN if Path(path).exists()]
    run_step("unshare", "--mount", "sh", "-euc", BUILD, folder, ROOT, *own)
    return built(folder, "daemon"), built(folder, "tier")


def built(folder: Path, target: str) -> BuiltImage:
    said = json.loads((folder / f"{target}.json").read_text())
    return BuiltImage(folder / target, said["OCIv1"]["config"])


def run_step(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=BUILD_LIMIT_S)


@pytest.fixture(scope="module")
def images() -> Iterator[tuple[BuiltImage, BuiltImage]]:
    """Contents of the images, which take gigabytes to make and are never kept."""
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
    """The image runs as its own user, without build tools, and is as small as the docs say."""
    assert image.config["User"] == "52780:52780"
    assert image.config["Entrypoint"] == ["shardcache"]
    assert image.config["Cmd"] == ["serve"]
    added = image.root / "opt" / "shardcache"
    assert size_bytes(added) <= SMALL_BYTES
    assert not list(added.rglob("pip"))
    assert not (image.root / "src").exists()
    assert not (image.root / "wheels").exists()
    assert not (image.root / "usr/sbin/nginx").exists()
    assert not list(added.rglob("cryptography"))


def test_the_tiers_adds_nginx_and_the_certificates_alone(
    image: BuiltImage, tier_image: BuiltImage
) -> None:
    """It is the daemon's in all that it says, and adds no more than the docs say."""
    assert tier_image.config == image.config
    assert (tier_image.root / "usr/sbin/nginx").exists()
    grown = size_bytes(tier_image.root) - size_bytes(image.root)
    assert 0 < grown <= TIER_BYTES


def test_the_daemonset_runs_on_it(image: BuiltImage, moto_server: MotoS3, tmp_path: Path) -> None:
    """The confined daemon prepares its folders, fetches, answers its probes, and ends well."""
    moto_server.make_bucket("image")
    url = moto_server.put("image", "a.tar", make_tar(random_samples(10)))
    objects = kustomized(KUBERNETES / "base")
    spec = by_kind(objects)["DaemonSet"]["spec"]["template"]["spec"]
    given = {
        thing["metadata"]["name"]: {"shardcache.toml": 'capacity = "1GB"\nmin_free = "0%"\n'}
        for thing in objects
        if thing["kind"] == "ConfigMap"
    }
    node = Node(
        tmp_path / "node", "127.0.0.1", given | {"shardcache-credentials": moto_server.env()}
    )
    with Pod("image", spec, node, image, image.env) as pod:
        (container,) = pod.containers.values()
        container.wait_until_started()
        warmed = container.exec("shardcache", "warm", url, "--json")
        assert warmed.returncode == 0, warmed.stdout + warmed.stderr
        status = json.loads(container.exec("shardcache", "status", "--json").stdout)
        assert status["cache"]["shards"] == 1
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
            made = tier.exec(
                "shardcache",
                "cluster",
                "certificates",
                "--shared",
                "--out",
                "/run/shardcache-tier/new",
            )
            assert made.returncode == 0, made.stderr
            for container in containers:
                container.signal(signal.SIGTERM)
            assert [container.wait() for container in containers] == [0] * 4


def size_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))
