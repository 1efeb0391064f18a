"""The private daemon in an unprivileged container, as strict as a Pod's spec allows."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.platforms.images import HostImage
from support.platforms.oci import Mount, Security, runtime_config
from support.platforms.pods import Container, why_not
from support.shards.tars import write_shards

SHARDS = 4
SAMPLES = 5
UID = 1000
STRICT = Security(
    UID, UID, (), frozenset(), read_only_root=True, may_gain_privileges=False, confined=True
)
WHY_NOT = why_not()

pytestmark = [pytest.mark.platform, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]

# Two processes read everything at once; both print the daemon that served them.
READ = """
import os, subprocess, sys
from shardcache.shared.private import PrivatePlace, node_has_daemon
from shardcache_client import ShardReader
other = None
if not sys.argv[2:]:
    other = subprocess.Popen([sys.executable, *sys.orig_argv[1:], "other"])
assert os.geteuid() != 0 and not node_has_daemon()
keys = [sample["__key__"] for sample in ShardReader(sys.argv[1])]
print(*keys, *PrivatePlace.find().running_sockets(), flush=True)
sys.exit(other.wait() if other else 0)
"""


@pytest.fixture
def bundle() -> Iterator[Path]:
    """A folder with a short path for a container's files and its one writable folder."""
    with tempfile.TemporaryDirectory(prefix="private-") as name:
        yield Path(name)


def test_processes_of_an_unprivileged_container_share_a_private_daemon(bundle: Path) -> None:
    """No capabilities, seccomp, a read-only root and no init; the daemon ends with it."""
    for name in ("data", "tmp"):
        (bundle / name).mkdir()
    (bundle / "tmp").chmod(0o1777)
    write_shards(bundle / "data", SHARDS, SAMPLES)
    image = HostImage(bundle / "image", {"python": ""}, "python")
    for name in ("data", "tmp"):
        (bundle / "image" / name).mkdir()
    mounts = [
        Mount(bundle / "data", "/data", read_only=True),
        Mount(bundle / "tmp", "/tmp"),
        *image.mounts(),
    ]
    env = {"PATH": "/image:/usr/bin:/bin", "HOME": "/tmp", "SHARDCACHE_MIN_FREE": "0"}
    command = ("python", "-c", READ, "/data/")
    config = runtime_config(image.lay_out(bundle / "rootfs"), command, env, STRICT, mounts)
    (bundle / "config.json").write_text(json.dumps(config))
    with Container(bundle.name, bundle, {}) as container:
        assert container.wait() == 0, container.log()
        printed = [
            line.split() for line in container.log().splitlines() if line.startswith("000000 ")
        ]
    assert [line[:-1] for line in printed] == [
        [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
    ] * 2
    (socket,) = {line[-1] for line in printed}
    assert Path(socket).parent == Path(f"/tmp/shardcache-private-{UID}")
    command = ["pgrep", "--full", f"{bundle}|{socket}"]
    assert subprocess.run(command, capture_output=True, check=False).stdout == b""
