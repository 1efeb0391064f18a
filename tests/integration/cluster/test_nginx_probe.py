"""The health probe of the tier's nginx."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from shardcache.cluster.nginx_probe import answer_of, main
from support.cluster.tier_nodes import TierNodes, needs_nginx
from support.programs.processes import children

HEAVY = ("click", "aiohttp", "asyncio", "rich", "braceexpand")


@needs_nginx
def test_probe_distinguishes_an_answering_nginx_from_a_hanging_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel takes connections for workers that are stopped: only an answer counts."""
    with TierNodes(["http://127.0.0.1:9"], 1) as nodes:
        (node,) = nodes.tier.nodes
        assert main([nodes.front(node)]) == 0
        assert capsys.readouterr().out == f"node1: 1 nodes, digest {nodes.tier.digest}\n"
        workers = children(nodes.pid(node))
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            answer_of(nodes.front(node), 0.05)
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    assert main([nodes.front(node)]) == 1
    assert "refused" in capsys.readouterr().err


def test_another_server_is_not_the_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no HTTP, as what is no tier, fails the probe."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "shardcache.cluster.nginx_probe", address]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as probe:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 404 Not Found\r\n\r\nhello")
            assert probe.wait() == 1
            assert probe.stderr is not None and b"status 404: not this tier" in probe.stderr.read()
    assert main([]) == 2


def test_the_probe_loads_little() -> None:
    """It runs every few seconds on each node."""
    code = f"import sys, shardcache.cluster.nginx_probe; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
