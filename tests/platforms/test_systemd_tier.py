"""The tier's unit under systemd itself: installed as the docs say, confined, and watched."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.tier import why_no_tier
from support.network.ports import free_port
from support.platforms.nspawn import Machine, installed, why_not
from support.programs.daemon import eventually
from support.programs.pages import recipe
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

UNIT = "shardcache-tier.service"
PARTS = Path("/var/cache/shardcache-tier/parts")
REASON = why_not() or why_no_tier()
LIMIT_S = 120.0

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(1200),
    pytest.mark.platform,
]


def own_address() -> str:
    """Return an address of this machine for others, or else a loopback one without TLS."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.99", 9))  # sends nothing
        except OSError:
            return "127.0.0.2"
        return str(sock.getsockname()[0])


class Node:
    """A machine with the daemon as a service, the list of nodes and their certificates."""

    def __init__(self, machine: Machine, server: MotoS3) -> None:
        self.machine = machine
        self._owner_port = free_port()
        self._store = server.endpoint_url
        self.name = machine.run("hostname", "-s").strip()
        machine.write("/site/nodes", f"{self.name}={own_address()}\n")
        certificates = (
            "cluster",
            "certificates",
            "--nodes",
            "/site/nodes",
            "--out",
            "/site/authority",
        )
        machine.run("shardcache", *certificates)

    def install(self) -> None:
        """Do as docs/cluster.md says, with this store, and addresses that are free here."""
        lines = recipe("shardcache-tier.service", "cluster")
        own = {
            "authority/node1": f"authority/{self.name}",
            "deploy/systemd": "/mnt",
            "--store https://s3.eu-central-1.amazonaws.com": (
                f"--store {self._store} --owner-port {self._owner_port}"
            ),
        }
        for documented, here in own.items():
            assert documented in lines
            lines = lines.replace(documented, here)
        self.machine.run("sh", "-ec", "cd /site\n" + lines)
        table = recipe('match = "s3://"', "cluster")
        config = "/etc/shardcache/shardcache.toml"
        self.machine.write(config, self.machine.run("cat", config) + table)
        self.machine.run("systemctl", "restart", "shardcache.service")

    def status(self) -> dict[str, Any]:
        where = ("--nodes", "/site/nodes", "--owner-port", str(self._owner_port))
        command = ("shardcache", "cluster", "status", *where, "--json")
        (found,) = json.loads(self.machine.run(*command).splitlines()[-1])["nodes"]
        return dict(found)

    def figures(self) -> dict[str, int]:
        return dict(self.status()["figures"])

    def pid(self) -> int:
        return int(self.machine.property(UNIT, "MainPID"))

    def nginx(self) -> list[int]:
        master = self.machine.run("pgrep", "--parent", str(self.pid())).strip()
        return [int(master), *map(int, self.machine.run("pgrep", "--parent", master).split())]

    def journal(self) -> str:
        return self.machine.run("journalctl", "--no-pager", f"--unit={UNIT}")

    def parts(self) -> set[str]:
        return set(
            self.machine.run("find", PARTS.parent, "-path", "*/parts/*", "-type", "f").split()
        )


@pytest.fixture(scope="module")
def url(moto_server: MotoS3) -> str:
    moto_server.make_bucket("systemd-tier")
    return moto_server.put("systemd-tier", "a.tar", make_tar(random_samples(20)))


def warm(node: Node, url: str) -> None:
    """Have the daemon fetch a shard by way of the tier, and not keep it."""
    before = sum(node.figures()[name] for name in ("hits", "misses"))
    node.machine.run("shardcache", "warm", url)
    node.machine.run("shardcache", "evict", url)
    # The figures are read from a log, every two seconds.
    eventually(
        lambda: sum(node.figures()[name] for name in ("hits", "misses")) > before, limit_s=LIMIT_S
    )


@pytest.fixture(scope="module")
def node(moto_server: MotoS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with the tier installed as documented, with its parts on a disk."""
    with installed(moto_server.env(), {tmp_path_factory.mktemp("disk"): PARTS.parent}) as machine:
        prepared = Node(machine, moto_server)
        prepared.install()
        yield prepared


def test_the_daemon_reads_by_way_of_it(node: Node, url: str) -> None:
    """The tier is up when the command has ended, and serves the second fetch."""
    assert node.machine.state(UNIT) == "active"
    assert node.machine.property(UNIT, "StatusText").startswith("1 node, digest ")
    warm(node, url)
    assert node.figures()["misses"] == 1
    assert node.figures()["hits"] == 0
    warm(node, url)
    assert node.figures()["misses"] == 1
    assert node.figures()["hits"] == 1
    assert len(node.parts()) == 1


def test_the_tier_can_do_nothing_else(node: Node) -> None:
    """No process has or may gain a capability; it sees no home and writes its folders only."""
    machine = node.machine
    machine.run("useradd", "--create-home", "alice")
    for pid in (node.pid(), *node.nginx()):
        status = dict(
            line.split(":\t", 1) for line in machine.run("cat", f"/proc/{pid}/status").splitlines()
        )
        assert int(status["CapEff"], 16) == 0
        assert int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert machine.run("stat", "--format=%U", f"/proc/{pid}").strip() == "shardcache"
        view = ("nsenter", f"--target={pid}", "--mount", "--wdns=/")
        assert machine.run(*view, "ls", "/home").split() == []
        for path in ("/etc/x", "/var/cache/x", "/var/cache/shardcache/x"):
            assert "Read-only file system" in machine.run(*view, "touch", path, fails=True)
        machine.run(*view, "touch", f"{PARTS.parent}/x")
    for path in (f"{PARTS}/.", "/run/shardcache-tier/.", "/etc/shardcache/tier/node.key"):
        assert "Permission denied" in machine.run("cat", path, user="alice", fails=True)


def test_a_kill_costs_no_part(node: Node, url: str) -> None:
    """systemd restarts the tier whichever process is killed, and the parts are served."""
    warm(node, url)
    parts = node.parts()
    for victim in (node.pid, lambda: node.nginx()[0]):
        before = node.pid()
        former = node.nginx()
        node.machine.run("kill", "-KILL", str(victim()))
        eventually(
            lambda before=before: (
                node.pid() not in (before, 0) and node.machine.state(UNIT) == "active"
            ),
            limit_s=LIMIT_S,
        )
        assert not set(node.nginx()) & set(former)
        assert node.machine.run("pgrep", "--count", "nginx").strip() == str(len(node.nginx()))
        assert parts == node.parts()
        warm(node, url)
        assert node.figures()["misses"] == 0
        assert node.figures()["hits"] == 1


def test_a_list_that_comes_late_is_used(node: Node) -> None:
    """The tier fails without its list, and says why; it is up soon after the list is there."""
    machine = node.machine
    machine.run("systemctl", "stop", UNIT)
    machine.run("mv", "/etc/shardcache/tier/nodes", "/run/nodes")
    machine.run("systemctl", "start", UNIT, fails=True)
    assert "cannot read the list of nodes" in node.journal()
    machine.run("mv", "/run/nodes", "/etc/shardcache/tier/nodes")
    eventually(lambda: machine.state(UNIT) == "active", limit_s=LIMIT_S)
