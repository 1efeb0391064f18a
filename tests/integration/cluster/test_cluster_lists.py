"""`shardcache cluster run` follows its files, however they are replaced."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardcache.cluster.authority import issue
from shardcache.cluster.nginx import NodeTier
from shardcache.cluster.tier import Tier, Tls, Upstream, parse
from shardcache.cluster.tier_status import ask
from shardcache.errors import ConfigError
from shardcache.origin.registry import TierState
from support.cluster.tier_nodes import needs_nginx, tier_findings
from support.disks.mounts import MountedFiles
from support.network.ports import free_port
from support.programs.cli import shardcache
from support.programs.daemon import eventually

STORE = "http://127.0.0.1:9"
ONE, TWO = "one=127.0.0.2\n", "one=127.0.0.2\ntwo=127.0.0.3\n"
USER = "root" if os.geteuid() == 0 else None


@contextmanager
def running(folder: Path, nodes: Path) -> Iterator[Path]:
    """Run the node `one` of a list; yield the file of what it says."""
    command = (
        *(sys.executable, "-m", "shardcache", "cluster", "run", "--nodes", nodes, "--node", "one", "--store", STORE),
        *("--front", f"127.0.0.1:{free_port()}", "--owner-port", str(free_port()), "--workers", "1"),
        *("--cache-dir", folder / "cache", "--run-dir", folder / "run"),
        *(("--user", USER) if USER else ()),
    )
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield log
    finally:
        process.terminate()
        process.wait()


@needs_nginx
def test_a_list_that_the_kubelet_replaces_is_followed(tmp_path: Path) -> None:
    """The file itself stays the same link: only the folder behind it is another."""
    mounted = MountedFiles(tmp_path / "mounted")
    mounted.replace({"nodes": ONE})
    with running(tmp_path, mounted.folder / "nodes") as log:
        eventually((tmp_path / "run" / "status.json").exists)
        mounted.replace({"nodes": TWO})
        eventually(lambda: "ready: 2 nodes" in log.read_text())


@needs_nginx
def test_a_list_without_the_node_changes_nothing(tmp_path: Path) -> None:
    """The node says so, and serves by the former list until the next one that has it."""
    mounted = MountedFiles(tmp_path / "mounted")
    mounted.replace({"nodes": ONE})
    with running(tmp_path, mounted.folder / "nodes") as log:
        eventually((tmp_path / "run" / "status.json").exists)
        mounted.replace({"nodes": "two=127.0.0.3\n"})
        eventually(lambda: "the previous configuration stays in use: one is not among the nodes" in log.read_text())
        assert "127.0.0.2:" in (tmp_path / "run" / "nginx.conf").read_text()
        mounted.replace({"nodes": TWO})
        eventually(lambda: "ready: 2 nodes" in log.read_text())


@needs_nginx
def test_a_list_that_changes_during_the_start_is_followed(tmp_path: Path) -> None:
    """It was read, and has changed before nginx runs: clearing a large cache after a power loss takes minutes."""
    nodes = tmp_path / "nodes"
    nodes.write_text(ONE)

    def listed() -> str:
        text = nodes.read_text()
        if text == ONE:
            nodes.write_text(TWO)
        return text

    with forked(tmp_path, nodes, listed) as log:
        eventually(lambda: log.exists() and "ready: 2 nodes" in log.read_text())


@needs_nginx
@pytest.mark.slow
async def test_names_that_have_no_address_yet_are_resolved_again(tmp_path: Path) -> None:
    """The list itself does not change any more; in the meantime, status and doctor report that it is not in use."""
    nodes, known, front, port = tmp_path / "nodes", tmp_path / "known", f"127.0.0.1:{free_port()}", free_port()
    nodes.write_text(ONE)

    def listed() -> str:
        if (text := nodes.read_text()) == TWO and not known.exists():
            raise ConfigError("the node two has no address")
        return text

    def status() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "run" / "status.json").read_text()))

    with forked(tmp_path, nodes, listed, front=front, owner_port=port) as log:
        eventually(lambda: log.exists() and "ready: 1 node" in log.read_text())
        nodes.write_text(TWO)
        eventually(lambda: status()["stale"] == "the node two has no address")
        (report,) = await ask(parse(ONE), port, None)
        assert report.state == "uses a former list: the node two has no address"
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
        others = (f"gpu-node-{number:05d}=127.1.{number // 250}.{number % 250 + 1}\n" for number in range(count - 1))
        nodes.write_text(ONE + "".join(others))

    put(1000)
    with forked(tmp_path, nodes, nodes.read_text) as log:
        eventually(lambda: log.exists() and "ready: 1000 nodes" in log.read_text())
        put(4096)
        eventually(lambda: "ready: 4096 nodes" in log.read_text())


@needs_nginx
async def test_certificates_that_expire_are_reported(tmp_path: Path) -> None:
    """By status, by doctor, and to the daemon, which has it in its own status and metrics."""
    nodes, front, port = tmp_path / "nodes", f"127.0.0.1:{free_port()}", free_port()
    nodes.write_text(ONE)
    (issued,) = issue(parse(ONE), tmp_path / "tls", 7)
    tls = Tls(issued.folder / "ca.pem", issued.folder / "node.pem", issued.folder / "node.key")
    with forked(tmp_path, nodes, nodes.read_text, tls=tls, front=front, owner_port=port):
        eventually((tmp_path / "run" / "status.json").exists)
        (report,) = await ask(parse(ONE), port, tls)
        (_, found) = tier_findings(tmp_path, front)
        tier = TierState(front)
        watching = asyncio.create_task(tier.watch())
        await asyncio.to_thread(eventually, lambda: tier.to_json()["certificate_expires_s"] is not None)
        expires_s = tier.to_json()["certificate_expires_s"]
        watching.cancel()
    assert report.state == "certificate expires in 6 days" and found["found"] == f"this node: {report.state}"
    assert expires_s == issued.expires.timestamp() // 1


@contextmanager
def forked(folder: Path, nodes: Path, listed: Callable[[], str], **options: Any) -> Iterator[Path]:
    """Run the node `one` of a list that a function returns; yield the file of what it says."""
    addresses, log = {"front": f"127.0.0.1:{free_port()}", "owner_port": free_port()}, folder / "log"

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
        NodeTier(read, "one", (nodes,), say=say, ready=lambda line: say(f"ready: {line}")).run(stopping)

    context = multiprocessing.get_context("fork")  # nginx ends with the process that runs it
    stopping: Any = context.Event()
    process = context.Process(target=run)
    process.start()
    try:
        yield log
    finally:
        stopping.set()
        process.join()


def test_a_list_that_is_missing_is_named(tmp_path: Path) -> None:
    """A path is not taken for the name of a node."""
    missing = tmp_path / "nodes"
    ran = shardcache("cluster", "run", "--nodes", missing, "--store", STORE, "--json")
    error = ran.json["error"]
    assert ran.code == 2 and "does not exist" in error["message"] and error["url"] == str(missing), error
