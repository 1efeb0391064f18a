"""A node's nginx: `shardcache cluster run` starts it, follows its files and ends with it."""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shardcache.cluster.authority import issue
from shardcache.cluster.nginx_probe import describe_nginx, main
from shardcache.cluster.node_list import parse
from shardcache.cluster.node_tier import NodeTier
from shardcache.cluster.tier_config import Tier, Tls, Upstream
from shardcache.cluster.tier_folder import finish, prepare
from shardcache.cluster.tier_status import ask
from shardcache.errors import ConfigError
from shardcache.origin.tier.tier_state import TierState
from support.cluster.tier_nodes import TierNodes, needs_nginx, tier_findings
from support.disks.mounts import MountedFiles
from support.network.ports import free_port
from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon, Process, eventually
from support.programs.guard import GUARD_S
from support.programs.processes import children, wait_until_ended

STORE = "http://127.0.0.1:9"
ONE = "one=127.0.0.2\n"
TWO = "one=127.0.0.2\ntwo=127.0.0.3\n"
USER = "root" if os.geteuid() == 0 else None
HEAVY = ("click", "aiohttp", "asyncio", "rich", "braceexpand")


class NodeRun:
    """The command on one node, started again by each `start` and gone after `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner_port = free_port()
        self.front = folder / "run" / "front.sock"
        self.mounted = MountedFiles(folder / "mounted")
        self.listed = self.mounted.folder / "nodes"
        self.mounted.replace({"nodes": ONE})
        self._started: list[Process] = []
        self._seen: set[int] = set()

    def begin(self, *flags: str) -> None:
        """Start `shardcache cluster run`."""
        args = (
            "cluster",
            "run",
            "--nodes",
            self.listed,
            "--node",
            "one",
            "--store",
            STORE,
            "--owner-port",
            self._owner_port,
            "--workers",
            1,
            "--cache-dir",
            self.folder / "cache",
            "--run-dir",
            self.folder / "run",
            *(("--user", USER) if USER else ()),
            *flags,
        )
        self._started.append(
            Daemon.usual_spawn(list(map(str, args)), os.environ, self.folder / "log")
        )

    def start(self) -> int:
        """Start it; return the process of nginx's master once its workers are there."""
        figures = self.folder / "run" / "status.json"
        figures.unlink(missing_ok=True)
        self.begin()
        self.until(figures.exists)
        (master,) = children(self.process.pid)
        self.until(lambda: children(master) != [])  # nginx is ready once it has bound its addresses
        self._seen |= {master, *children(master)}
        return master

    @property
    def process(self) -> Process:
        """The command that was started last."""
        return self._started[-1]

    def status(self) -> Ran:
        """Run `shardcache cluster status`."""
        return shardcache(
            "cluster",
            "status",
            "--nodes",
            self.listed,
            "--owner-port",
            str(self._owner_port),
            "--json",
        )

    def said(self) -> str:
        """Return what it has printed."""
        log = self.folder / "log"
        return log.read_text() if log.exists() else ""

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds. Raises AssertionError if the command ends before."""

        def holds() -> bool:
            assert self.process.poll() is None, self.said()
            return condition()

        eventually(holds)

    def close(self) -> None:
        """Kill it, and what it has started."""
        for process in self._started:
            process.kill()
            process.wait()
        for pid in self._seen:
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended with the command
                if Path(f"/proc/{pid}/comm").read_text().strip() == "nginx":
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeRun]:
    """One node of a tier."""
    made = NodeRun(tmp_path)
    try:
        yield made
    finally:
        made.close()


@needs_nginx
@pytest.mark.slow
def test_node_follows_its_list_and_stops(node: NodeRun) -> None:
    """It starts nginx, publishes figures, uses a list that the kubelet replaces, and ends cleanly.

    Of such a file the link stays the same, only the folder behind it is another. A list without the
    node changes nothing.
    """
    node.start()
    assert node.said() == f"ready: 1 node, digest {node.status().json['nodes'][0]['digest']}\n"
    assert [(node.folder / name).stat().st_mode & 0o777 for name in ("cache", "run")] == [
        0o700,
        0o750,
    ]
    node.mounted.replace({"nodes": "two=127.0.0.3\n"})
    node.until(
        lambda: "the previous configuration stays in use: one is not among the nodes" in node.said()
    )
    assert "127.0.0.2:" in (node.folder / "run" / "nginx.conf").read_text()
    node.mounted.replace({"nodes": TWO})
    node.until(lambda: "ready: 2 nodes" in node.said())
    shown = node.status()
    assert shown.code == 1
    assert [each["up"] for each in shown.json["nodes"]] == [True, False]
    found = tier_findings(node.folder, str(node.front))
    assert [finding["state"] for finding in found] == ["ok"]
    node.process.terminate()
    assert node.process.wait(GUARD_S) == 0
    assert [finding["state"] for finding in tier_findings(node.folder, str(node.front))] == [
        "failed"
    ]
    assert (node.folder / "cache" / "clean").exists()


@pytest.mark.slow
@needs_nginx
def test_neither_the_command_nor_nginx_outlives_the_other(node: NodeRun) -> None:
    """Killed by SIGKILL, it leaves no process of nginx, and the next one serves at the same ports.

    When nginx's master is killed, its workers are, too, and the command fails.
    """
    master = node.start()
    running = [master, *children(master)]
    assert len(running) > 1
    node.process.kill()
    for pid in running:
        wait_until_ended(pid)
    master = node.start()
    workers = children(master)
    os.kill(master, signal.SIGKILL)
    assert node.process.wait(GUARD_S) == 1
    assert "nginx ended with status -9" in node.said()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@needs_nginx
@pytest.mark.slow
def test_tier_serves_while_its_figures_cannot_be_written(node: NodeRun) -> None:
    """The reason is reported; the figures are published again as soon as that is possible."""
    node.start()
    figures = node.folder / "run" / "status.json"
    in_the_way = node.folder / "run" / ".status.json"  # the name of a new file until it is complete

    def is_in_the_way() -> bool:
        with suppress(FileExistsError):  # it is being written
            in_the_way.mkdir()
        return in_the_way.is_dir()

    node.until(is_in_the_way)
    node.until(lambda: "figures are not up to date" in node.said())
    assert describe_nginx(str(node.front)).startswith("one: 1 nodes")
    in_the_way.rmdir()
    figures.unlink()
    node.until(figures.exists)


def test_parts_survive_a_crash_and_not_a_power_loss(tmp_path: Path) -> None:
    """The cache is cleared after a boot unless the tier was stopped before it."""
    part = tmp_path / "parts" / "a"
    part.parent.mkdir()
    part.write_text("bytes")
    assert prepare(tmp_path, "boot 1"), "a folder of unknown history"
    part.parent.mkdir()
    part.write_text("bytes")
    assert not prepare(tmp_path, "boot 1"), "nginx was killed"
    finish(tmp_path)
    assert not prepare(tmp_path, "boot 2"), "an orderly reboot"
    assert part.exists()
    assert prepare(tmp_path, "boot 3"), "the power failed"
    assert not part.exists()


@needs_nginx
@pytest.mark.slow
async def test_names_that_have_no_address_yet_are_resolved_again(tmp_path: Path) -> None:
    """The list does not change again, and status and doctor report that it is unused."""
    nodes = tmp_path / "nodes"
    known = tmp_path / "known"
    port = free_port()
    front = str(tmp_path / "run" / "front.sock")
    nodes.write_text(ONE)

    def listed() -> str:
        text = nodes.read_text()
        if text == TWO and not known.exists():
            raise ConfigError("the node two has no address")
        return text

    def status() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "run" / "status.json").read_text()))

    with forked(tmp_path, nodes, listed, owner_port=port) as log:
        eventually(lambda: log.exists() and "ready: 1 node" in log.read_text())
        eventually((tmp_path / "run" / "status.json").exists)  # the figures follow soon after
        nodes.write_text(TWO)
        eventually(lambda: status()["stale"] == "the node two has no address")
        (report,) = await ask(parse(ONE), port, None)
        assert report.state == "uses an old list: the node two has no address"
        assert [found["state"] for found in tier_findings(tmp_path, front)] == ["ok", "failed"]
        known.touch()
        eventually(lambda: "ready: 2 nodes" in log.read_text() and status()["stale"] is None)
        assert log.read_text().count("the previous configuration stays in use") == 1


@needs_nginx
@pytest.mark.slow
def test_a_list_may_have_thousands_of_nodes(tmp_path: Path) -> None:
    """nginx starts with one thousand, and continues with four thousand."""
    nodes = tmp_path / "nodes"

    def put(count: int) -> None:
        others = (
            f"gpu-node-{number:05d}=127.1.{number // 250}.{number % 250 + 1}\n"
            for number in range(count - 1)
        )
        nodes.write_text(ONE + "".join(others))

    put(1000)
    with forked(tmp_path, nodes, nodes.read_text) as log:
        eventually(lambda: log.exists() and "ready: 1000 nodes" in log.read_text())
        put(4096)
        eventually(lambda: "ready: 4096 nodes" in log.read_text())


@needs_nginx
async def test_certificates_that_expire_are_reported(tmp_path: Path) -> None:
    """By status, by doctor, and to the daemon, which has it in its own status and metrics."""
    nodes = tmp_path / "nodes"
    front = str(tmp_path / "run" / "front.sock")
    port = free_port()
    nodes.write_text(ONE)
    (issued,) = issue(parse(ONE), tmp_path / "tls", 7)
    tls = Tls(issued.folder / "ca.pem", issued.folder / "node.pem", issued.folder / "node.key")
    with forked(tmp_path, nodes, nodes.read_text, tls=tls, owner_port=port):
        eventually((tmp_path / "run" / "status.json").exists)
        (report,) = await ask(parse(ONE), port, tls)
        (_, found) = tier_findings(tmp_path, front)
        tier = TierState(front)
        watching = asyncio.create_task(tier.watch())
        await asyncio.to_thread(
            eventually, lambda: tier.to_json()["certificate_expires_s"] is not None
        )
        expires_s = tier.to_json()["certificate_expires_s"]
        watching.cancel()
    assert report.state == "certificate expires in 6 days"
    assert found["found"] == f"this node: {report.state}"
    assert expires_s == issued.expires.timestamp() // 1


@contextmanager
def forked(folder: Path, nodes: Path, listed: Callable[[], str], **options: Any) -> Iterator[Path]:
    """Run the node `one` of a list that a function returns; yield the file of what it says."""
    addresses = {"owner_port": free_port()}
    log = folder / "log"

    def read() -> Tier:
        return Tier(
            nodes=parse(listed()),
            stores=(Upstream.parse(STORE),),
            cache_dir=str(folder / "cache"),
            run_dir=str(folder / "run"),
            min_free_bytes=1,
            user=USER,
            workers=1,
            **(addresses | options),
        )

    def say(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    def run() -> None:
        NodeTier(read, "one", (nodes,), say, lambda line: say(f"ready: {line}")).run(stopping)

    context = multiprocessing.get_context("fork")  # nginx ends with the process that runs it
    stopping: Any = context.Event()
    process = context.Process(target=run)
    process.start()
    try:
        yield log
    finally:
        stopping.set()
        process.join()


@pytest.mark.slow
@needs_nginx
def test_node_waits_for_a_list_that_has_it(
    node: NodeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe succeeds meanwhile, and nginx starts soon after the list has the node."""
    node.mounted.replace({"nodes": "two=127.0.0.3\n"})
    node.begin("--wait")
    node.until(lambda: "waiting: one is not among the nodes" in node.said())
    node.until(lambda: main([str(node.front)]) == 0)
    assert "waiting: one is not among the nodes" in capsys.readouterr().out
    node.mounted.replace({"nodes": TWO})
    node.until(lambda: "ready: 2 nodes" in node.said())
    assert main([str(node.front)]) == 0
    assert "one: 2 nodes" in capsys.readouterr().out
    node.process.terminate()
    assert node.process.wait(GUARD_S) == 0
    assert main([str(node.front)]) == 1


def test_a_list_that_is_missing_is_named(tmp_path: Path) -> None:
    """A path is not taken for the name of a node."""
    missing = tmp_path / "nodes"
    ran = shardcache("cluster", "run", "--nodes", missing, "--store", STORE, "--json")
    error = ran.json["error"]
    assert ran.code == 2, error
    assert "does not exist" in error["message"], error
    assert error["url"] == str(missing), error


@needs_nginx
def test_probe_distinguishes_an_answering_nginx_from_a_hanging_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The kernel takes connections for workers that are stopped: only an answer counts."""
    with TierNodes([STORE], 1) as nodes:
        (node,) = nodes.tier.nodes
        assert main([nodes.front(node)]) == 0
        assert capsys.readouterr().out == f"node1: 1 nodes, digest {nodes.tier.digest}\n"
        workers = children(nodes.nginx[node.name].pid)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            describe_nginx(nodes.front(node), 0.05)
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
        nodes.nginx[node.name].kill()
        assert main([nodes.front(node)]) == 1
    assert "Connection refused" in capsys.readouterr().err


def test_the_probe_loads_little_and_takes_no_other_server_for_the_tier() -> None:
    """It runs every few seconds on each node. Any other server fails it."""
    code = (
        "import sys\nfrom shardcache.cluster.nginx_probe import main\n"
        f"print(main(sys.argv[1:]), [name for name in {HEAVY} if name in sys.modules])"
    )
    with (
        tempfile.TemporaryDirectory(prefix="sc-") as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(f"{folder}/front.sock")
        server.listen()
        command = [sys.executable, "-c", code, server.getsockname()]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as probe:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 404 Not Found\r\n\r\nhello")
            out, err = probe.communicate()
    assert out.strip() == "1 []"
    assert "not this tier" in err
    assert main(["one", "two"]) == 2
