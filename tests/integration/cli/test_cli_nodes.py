"""`shardcache top --nodes` and `status --nodes`: several real daemons at their TCP ports, in one view."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.network.ports import free_port
from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.programs.terminal import LEAVE_ALTERNATE_SCREEN, Terminal
from support.shards.tars import write_shards

TOKEN = "0123456789abcdef0123456789abcdef"
INTERVAL = "0.1"


class NodeDaemon(Daemon):
    """A daemon that answers at a TCP port, with a token."""

    def __init__(self, root: Path, token_file: Path) -> None:
        root.mkdir()
        self.port = free_port()
        super().__init__(root, "--http", f"127.0.0.1:{self.port}", "--http-token-file", str(token_file))

    @property
    def name(self) -> str:
        """As the command names it."""
        return f"127.0.0.1:{self.port}"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """The token that all daemons have."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def pair(tmp_path: Path, token_file: Path) -> Iterator[tuple[NodeDaemon, NodeDaemon]]:
    """Two nodes."""
    with NodeDaemon(tmp_path / "a", token_file) as first, NodeDaemon(tmp_path / "b", token_file) as second:
        yield first, second


def top(*args: str | Path) -> Any:
    """Run `top --once --json` and return what it says."""
    ran = shardcache("top", "--once", "--json", "--interval", INTERVAL, *args)
    assert ran.err == "", ran.err
    return ran.json | {"code": ran.code}


def test_nodes_are_rows_and_their_sum(pair: tuple[NodeDaemon, NodeDaemon], token_file: Path, tmp_path: Path) -> None:
    """Each node's cache and readers, and the totals of both; on 80 columns, too."""
    first, second = pair
    (tmp_path / "store").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "store", 2, samples_per_shard=10)]
    first.request("POST", "/v1/warm", {"urls": urls})
    nodes = f"{first.name},{second.name}"
    with RawSession(second, job="train") as session:
        session.plan(urls, [0, 1])
        seen = top("--nodes", nodes, "--http-token-file", token_file)
        page = shardcache(
            "top", "--once", "--nodes", nodes, env={"SHARDCACHE_HTTP_TOKEN_FILE": str(token_file), "COLUMNS": "80"}
        )
    used = [node["status"]["cache"]["used_bytes"] for node in seen["nodes"]]
    assert [node["node"] for node in seen["nodes"]] == [first.name, second.name] and used[0] > 0
    assert all(node["rates"]["interval_s"] > 0 for node in seen["nodes"])
    assert seen["totals"] | {"hits": 0, "misses": 0} == {
        "up": 2,
        "used_bytes": sum(used),
        "capacity_bytes": 2 * 10**9,
        "hits": 0,
        "misses": 0,
        "readers": 1,
        "waiting": 0,
    }
    rows = [" ".join(line.split()) for line in page.out.splitlines()]
    assert page.code == 0 and max(map(len, page.out.splitlines())) <= 80
    assert rows[0] == "2 nodes" and rows[1] == "node state cache origin hits jobs readers waiting"
    assert rows[2].startswith(f"{first.name} up 0% of 1.0 GB 0 Bytes/s ") and rows[3].startswith(f"{second.name} up ")
    assert rows[4].startswith("all 2 up 0% of 2.0 GB ") and rows[4].endswith(" 1 1 0")


def test_a_killed_node_is_down_with_its_reason(pair: tuple[NodeDaemon, NodeDaemon], token_file: Path) -> None:
    """The other one's figures stay; exit 1 while any answers, 3 when none does."""
    first, second = pair
    second.kill()
    seen = top("--nodes", f"{first.name},{second.name}", "--http-token-file", token_file)
    assert seen["code"] == 1 and seen["totals"]["up"] == 1
    assert [node.get("error", {}).get("code") for node in seen["nodes"]] == [None, "no_daemon"]
    page = shardcache("status", "--nodes", f"{first.name},{second.name}", "--http-token-file", token_file)
    rows = [" ".join(line.split()) for line in page.out.splitlines()]
    assert page.code == 1 and f"{second.name} down" in rows
    assert f"{second.name}: no daemon answers: Connection refused" in rows
    first.kill()
    assert shardcache("status", "--nodes", f"{first.name},{second.name}").code == 3


def test_the_view_goes_on_beside_a_node_that_hangs(pair: tuple[NodeDaemon, NodeDaemon], token_file: Path) -> None:
    """A frozen daemon accepts and does not answer: it becomes down, and pages of the other come all the time."""
    first, second = pair
    second.pause()
    command = [sys.executable, "-m", "shardcache", "top", "--json", "--interval", INTERVAL]
    command += ["--nodes", f"{first.name},{second.name}", "--http-token-file", str(token_file)]
    with subprocess.Popen(command, env=clean_environment({}), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            uptimes, asked = set(), 0
            for line in map(json.loads, process.stdout):
                living, frozen = line["nodes"]
                if "error" in frozen:
                    break
                asked += frozen["status"] is None
                uptimes.add(living["status"] and living["status"]["uptime_s"])
        finally:
            process.kill()
    assert frozen["error"]["message"] == "no answer within 5 s"
    assert len(uptimes) > 2 and asked > 2 and living["status"]["pid"] == first.pid


def test_a_node_that_is_back_is_up_again(pair: tuple[NodeDaemon, NodeDaemon], token_file: Path) -> None:
    """Its rates start anew."""
    first, second = pair
    second.kill()
    command = [sys.executable, "-m", "shardcache", "top", "--json", "--interval", INTERVAL]
    command += ["--nodes", second.name, "--http-token-file", str(token_file)]
    with subprocess.Popen(command, env=clean_environment({}), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            lines = (json.loads(line)["nodes"][0] for line in process.stdout)
            assert "error" in next(line for line in lines if "error" in line)
            second.start()
            back = next(line for line in lines if "error" not in line)
        finally:
            process.kill()
    assert back["status"]["pid"] == second.pid and first.pid != second.pid


def test_it_is_live_on_a_terminal(pair: tuple[NodeDaemon, NodeDaemon], token_file: Path) -> None:
    """Until q, and what becomes of a node is seen."""
    first, second = pair
    command = [sys.executable, "-m", "shardcache", "top", "--interval", INTERVAL]
    command += ["--nodes", f"{first.name},{second.name}", "--http-token-file", str(token_file)]
    terminal = Terminal(command, columns=80)
    try:
        terminal.read_until("2 up")
        second.kill()
        terminal.read_until(f"{second.name}: no daemon answers")
        terminal.press("q")
        assert terminal.wait() == 0 and LEAVE_ALTERNATE_SCREEN in terminal.seen
    finally:
        terminal.close()
    assert "Traceback" not in terminal.seen


def test_without_the_token_a_node_is_down_with_the_remedy(
    pair: tuple[NodeDaemon, NodeDaemon], token_file: Path
) -> None:
    """The reason is the daemon's, the remedy names the option."""
    first, _ = pair
    wrong = token_file.with_name("wrong")
    wrong.write_text("wrong")
    for flags in ((), ("--http-token-file", wrong)):
        [node] = top("--nodes", first.name, *flags)["nodes"]
        assert node["error"]["code"] == "not_allowed" and "--http-token-file" in node["error"]["remedy"]


def test_the_token_goes_to_the_named_nodes_alone(token_file: Path) -> None:
    """A server that redirects gets no second request from us, and neither does the place that it names."""
    with socket.create_server(("127.0.0.1", 0)) as lure, socket.create_server(("127.0.0.1", 0)) as target:
        lure.settimeout(60)
        name = f"127.0.0.1:{lure.getsockname()[1]}"
        command = [sys.executable, "-m", "shardcache", "status", "--json", "--nodes", name]
        command += ["--http-token-file", str(token_file)]
        with subprocess.Popen(command, env=clean_environment({}), stdout=subprocess.PIPE) as process:
            connection, _ = lure.accept()
            with connection:
                assert TOKEN.encode() in connection.recv(65536)
                elsewhere = f"http://127.0.0.1:{target.getsockname()[1]}/"
                answer = (
                    f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                connection.sendall(answer.encode())
            out, _ = process.communicate()
        target.setblocking(False)
        with pytest.raises(BlockingIOError):
            target.accept()
    assert process.returncode == 3 and json.loads(out)["nodes"][0]["error"]["code"] == "protocol"


@pytest.mark.parametrize("name", ["a:b", "ftp://node", "http://node/path", "node:99999", ":9300"])
def test_what_is_no_node_is_a_usage_error(name: str) -> None:
    """The error says how to write one."""
    ran = shardcache("status", "--nodes", name)
    assert ran.code == 2 and "HOST:PORT" in ran.err


def test_a_token_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """It is named."""
    ran = shardcache("top", "--nodes", "node", "--http-token-file", tmp_path / "none")
    assert ran.code == 2 and str(tmp_path / "none") in ran.err
