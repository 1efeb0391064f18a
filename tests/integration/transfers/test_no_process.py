"""A daemon whose processes are killed while they are idle, and one that cannot start others: its Python is gone."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from shardcache.errors import NO_PROCESS_REMEDY, CacheError
from support.programs.daemon import Daemon, eventually, spawn
from support.programs.processes import running, wait_until_ended
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

FETCHING, INDEXING = "shardcache.transport.worker", "shardcache.store.indexing"
IDLE = {FETCHING: 2, INDEXING: 1}


def kill_all(daemon: Daemon, module: str) -> None:
    """Kill the daemon's idle processes that run a module."""
    eventually(lambda: len(running(daemon.pid, module)) == IDLE[module])
    for pid in running(daemon.pid, module):
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)


@pytest.mark.parametrize("module", [FETCHING, INDEXING])
def test_a_process_that_is_killed_while_idle_costs_no_shard(module: str, moto: Bucket, tmp_path: Path) -> None:
    """As the kernel does when memory is short: another takes its place."""
    body = make_tar(random_samples(2))
    with Daemon(tmp_path, env=moto.env()) as daemon, RawSession(daemon) as session:
        kill_all(daemon, module)
        session.plan([moto.put("a.tar", body)], [0])
        assert Path(session.take(0)["path"]).read_bytes() == body


@pytest.mark.parametrize(
    ("module", "process", "schemes"),
    [
        (FETCHING, "a transport worker", ["s3", "http"]),
        (INDEXING, "a process to index shards", ["s3"]),
    ],
)
def test_a_process_that_cannot_be_started_is_an_error_that_says_so(
    module: str, process: str, schemes: list[str], moto: Bucket, tmp_path: Path
) -> None:
    """It names the shard and the remedy; once processes can be started again, shards come without a restart."""
    python, real = tmp_path / "python", Path(sys.executable).resolve()
    python.symlink_to(real)
    body = make_tar(random_samples(2))
    stored = {"s3": moto.put("a.tar", body), "http": "http://127.0.0.1:1/b.tar"}
    urls = [stored[scheme] for scheme in schemes]
    env = moto.env() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with Daemon(tmp_path, env=env, spawn=partial(spawn, python=str(python))) as daemon, RawSession(daemon) as session:
        eventually(lambda: all(len(running(daemon.pid, each)) == count for each, count in IDLE.items()))
        python.unlink()
        kill_all(daemon, module)
        session.plan(urls, list(range(len(urls))))
        for position, url in enumerate(urls):
            error = session.ask("lease", position=position)["error"]
            assert (error["code"], error["url"], error["remedy"]) == (CacheError.code, url, NO_PROCESS_REMEDY)
            assert f"cannot start {process}" in error["message"]
        python.symlink_to(real)
        assert Path(session.take(0)["path"]).read_bytes() == body
