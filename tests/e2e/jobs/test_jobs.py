"""Whole training jobs: ranks times workers, under torchrun and under torch.distributed alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("training_job.py")


def read_by_rank(out: Path) -> list[list[list[str]]]:
    """Return what each process wrote down: its epochs, each a list of keys."""
    return [json.loads(path.read_text()) for path in out.iterdir()]


def plain_env() -> dict[str, str]:
    """Return this process's environment without what launchers set; one thread a process is enough here."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    return {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}


def check(out: Path, keys: list[str]) -> None:
    """Both epochs give every sample once over the two ranks, half to each, and are orders of their own."""
    ranks = read_by_rank(out)
    assert len(ranks) == 2
    for epoch in range(2):
        assert sorted(key for rank in ranks for key in rank[epoch]) == keys
        assert [len(rank[epoch]) for rank in ranks] == [len(keys) // 2] * 2
    assert sorted(ranks[0][0]) != sorted(ranks[0][1]), "other samples, too: ranks take parts of one sequence"


def test_torchrun(daemon: Daemon, index: str, keys: list[str], tmp_path: Path) -> None:
    """Two ranks of two forked workers, ranks from torchrun's variables; each shard is fetched once for all."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    where = [str(daemon.socket), index, str(tmp_path), "fork"]
    done = subprocess.run(
        [*command, str(SCRIPT), *where], env=plain_env(), capture_output=True, text=True, timeout=GUARD_S, check=False
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path, keys)
    eventually(lambda: daemon.sessions() == 0)
    assert daemon.leases() == 0
    assert daemon.status()["counters"]["misses"] <= 8


def test_torch_distributed_alone(daemon: Daemon, index: str, keys: list[str], tmp_path: Path) -> None:
    """Ranks that only torch.distributed knows reach forked workers, and spawned ones, who never initialise it."""
    out = tmp_path / "out"
    out.mkdir()
    where = [str(daemon.socket), index, str(out)]
    rendezvous = str(tmp_path / "rendezvous")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *where, method, rendezvous, str(rank), "2"],
            env=plain_env(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, method in enumerate(["fork", "spawn"])
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=GUARD_S)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    check(out, keys)
