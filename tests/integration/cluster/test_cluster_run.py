"""`shardcache cluster run`: a node's nginx as a service manager or a scheduler starts it, and how both end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardcache.cluster.nginx import finish, prepare
from support.cluster.tier_nodes import needs_nginx, tier_findings
from support.network.ports import free_port
from support.programs.cli import Ran, shardcache
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.programs.processes import children, wait_until_ended

STORE = "http://127.0.0.1:9"


class NodeRun:
    """The command on one node, started again by each `start`; nothing of it is left after `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.front, self._owner_port = folder, free_port(), free_port()
        self.listed = folder / "nodes"
        self.listed.write_text("one=127.0.0.2\n")
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: set[int] = set()

    def start(self) -> int:
        """Start it; return the process of nginx's master as soon as nginx serves figures."""
        command = (
            *(sys.executable, "-m", "shardcache", "cluster", "run", "--nodes", self.listed, "--node", "one"),
            *("--store", STORE, "--front", f"127.0.0.1:{self.front}", "--owner-port", self._owner_port),
            *("--workers", 1, "--cache-dir", self.folder / "cache", "--run-dir", self.folder / "run"),
            *(("--user", "root") if os.geteuid() == 0 else ()),
        )
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.until(lambda: '"cached_bytes": 0' in json.dumps(self.status().json))
        (master,) = children(self.process.pid)
        self._seen |= {master, *children(master)}
        return master

    def status(self) -> Ran:
        """Run `shardcache cluster status`."""
        return shardcache("cluster", "status", "--nodes", self.listed, "--owner-port", str(self._owner_port), "--json")

    def said(self) -> str:
        """Return what it has printed."""
        return (self.folder / "log").read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds. Raises AssertionError if the command ends before."""

        def holds() -> bool:
            assert self.process is not None and self.process.poll() is None, self.said()
            return condition()

        eventually(holds)

    def close(self) -> None:
        """Kill it, and what it has started."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
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
def test_it_follows_its_list_and_stops(node: NodeRun) -> None:
    """It starts nginx, says so, publishes figures, uses a changed list of nodes, and ends cleanly."""
    node.start()
    assert node.said() == f"ready: 1 node, digest {node.status().json['nodes'][0]['digest']}\n"
    assert {(node.folder / name).stat().st_mode & 0o777 for name in ("cache", "run")} == {0o700}
    node.listed.write_text("one=127.0.0.2\ntwo=127.0.0.3\n")
    node.until(lambda: "ready: 2 nodes" in node.said())
    shown = node.status()
    assert shown.code == 1 and [each["up"] for each in shown.json["nodes"]] == [True, False]
    found = tier_findings(node.folder, f"127.0.0.1:{node.front}")
    assert [finding["state"] for finding in found] == ["ok"]
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(GUARD_S) == 0
    assert [finding["state"] for finding in tier_findings(node.folder, f"127.0.0.1:{node.front}")] == ["failed"]
    assert (node.folder / "cache" / "clean").exists()


@needs_nginx
def test_killed_it_takes_nginx_with_it(node: NodeRun) -> None:
    """No process of nginx is left when the command dies by SIGKILL; the next one serves at the same ports."""
    master = node.start()
    running = [master, *children(master)]
    assert node.process is not None and len(running) > 1
    node.process.kill()
    node.process.wait()
    for pid in running:
        wait_until_ended(pid, GUARD_S)
    node.start()


@needs_nginx
def test_it_does_not_outlive_nginx(node: NodeRun) -> None:
    """When nginx's master dies by SIGKILL, its workers are killed, and the command fails."""
    master = node.start()
    workers = children(master)
    assert node.process is not None and workers
    os.kill(master, signal.SIGKILL)
    assert node.process.wait(GUARD_S) == 1
    assert "nginx ended with status -9" in node.said()
    for pid in workers:
        assert not Path(f"/proc/{pid}").exists()
    node.start()


def test_parts_survive_a_crash_and_not_a_power_loss(tmp_path: Path) -> None:
    """The cache is cleared if the machine booted since it was used, unless the tier was stopped before."""
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
