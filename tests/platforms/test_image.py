"""The Dockerfile built for real, and the DaemonSet's container run of what came out."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.images import BuiltImage, build, why_not_built
from support.moto_s3 import MotoS3
from support.pods import Node, Pod, why_not
from support.rendered import KUBERNETES, by_kind, kustomized
from support.tars import make_tar, random_samples

WHY_NOT = why_not() or why_not_built()

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(4000),  # it downloads a Debian and all that the daemon needs
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
SMALL_BYTES = 120_000_000  # docs/deploy-kubernetes.md says 110 MB


@pytest.fixture(scope="module")
def image() -> Iterator[BuiltImage]:
    """Contents of the image; a gigabyte while it is made, so nothing of it is kept, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        yield build(Path(folder))


def test_it_is_small_and_not_roots(image: BuiltImage) -> None:
    """It runs the daemon as its own user, without the tools that made it, and adds no more than the docs say."""
    assert (image.config["User"], image.config["Entrypoint"], image.config["Cmd"]) == (
        "52780:52780",
        ["shardcache"],
        ["serve"],
    )
    added = image.root / "opt" / "shardcache"
    assert sum(path.lstat().st_size for path in added.rglob("*")) <= SMALL_BYTES
    assert not list(added.rglob("pip")) and not (image.root / "src").exists() and not (image.root / "wheels").exists()


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
        assert container.probe("readiness") and container.probe("liveness")
        container.signal(signal.SIGTERM)
        assert container.wait() == 0, container.log()
