"""Ranks that share a dataset made before them, under each launcher: every sample once, rank by rank, epoch by epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache_client import ShardDataset
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("launched_job.py")
LIGHTNING_JOB = JOB.with_name("lightning_job.py")
LOOKING_JOB = JOB.with_name("looking_job.py")
RESTARTED_JOB = JOB.with_name("restarted_job.py")
ELASTIC_JOB = JOB.with_name("elastic_job.py")
COUNTS = (7, 12, 1, 20, 5, 15)
WORLD, BATCH = 2, 5  # as in the job

Read = dict[str, list[list[str]]]


@pytest.fixture(scope="module")
def train(folder: Path) -> str:
    """The index file of 60 samples whose bytes begin with their keys."""
    source, first = folder / "train", 0
    source.mkdir()
    for number, count in enumerate(COUNTS):
        keys = [f"{key:06d}" for key in range(first, first + count)]
        (source / f"{number}.tar").write_bytes(
            make_tar([{"__key__": key, "bin": key.encode() + bytes(5000)} for key in keys])
        )
        first += count
    rows = [{"url": f"{number}.tar", "nsamples": count} for number, count in enumerate(COUNTS)]
    (source / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return f"file://{source}/index.json"


def dataset(train: str, daemon: Daemon, rank: int) -> ShardDataset:
    """Return the job's dataset, as a process that is started as that rank makes it for itself."""
    return ShardDataset(
        train, shuffle=True, seed=7, batch_size=BATCH, socket=daemon.socket, rank=rank, world_size=WORLD
    )


def epochs(ds: ShardDataset, number: int) -> list[list[str]]:
    """Read so many epochs."""
    return [[sample["__key__"] for sample in ds] for _ in range(number)]


@pytest.mark.parametrize("launcher", ["spawn", "fork", "notebook", "debug"])
def test_ranks_that_share_a_dataset_made_before_them(launcher: str, train: str, daemon: Daemon, tmp_path: Path) -> None:
    """Epochs are counted, set and resumed, and values handed over, as if each rank had made the dataset for itself."""
    ranks = [dataset(train, daemon, rank) for rank in range(WORLD)]
    expected = [epochs(ds, 3) for ds in ranks]
    assert sorted(key for rank in expected for key in rank[0]) == [f"{key:06d}" for key in range(sum(COUNTS))]

    stopped = dataset(train, daemon, 0).loader(num_workers=0, collate_fn=list)
    batches = iter(stopped)
    next(batches)
    next(batches)
    state = json.dumps(stopped.state_dict())
    command = [sys.executable, str(JOB), launcher, str(daemon.socket), train, str(tmp_path), state]
    run(command)
    for rank, read in enumerate(expected):
        told: Read = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["counted"][:2] == read[:2]
        assert sorted(told["counted"][2]) == sorted(read[2]), "by two workers in turn"
        assert told["resumed"] == [read[0][2 * BATCH :], read[1]]
        assert told["set"] == read[:2]
        assert told["alone"] == told["handed over"] == read[:1]


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_lightnings_ranks_that_share_a_loader(strategy: str, train: str, daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs, batch by batch, of a loader made before the ranks, without any sampler of Lightning's."""
    run([sys.executable, str(LIGHTNING_JOB), strategy, str(daemon.socket), train, str(tmp_path)])
    for rank in range(WORLD):
        shown = json.loads((tmp_path / f"{rank}.json").read_text())
        assert shown == epochs(dataset(train, daemon, rank), 3)


def torchrun(job: Path, train: str, daemon: Daemon, out: Path, *scenario: str) -> list[list[list[str]]]:
    """Run a job of torchrun's; return what each rank read, by epoch."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}", "--standalone"]
    run([*launch, "--max-restarts=1", str(job), *scenario, str(daemon.socket), train, str(out)])
    return [json.loads((out / f"{rank}.json").read_text())["read"] for rank in range(WORLD)]


@pytest.mark.parametrize("scenario", ["look", "own"])
def test_a_rank_that_looks_on_its_own(scenario: str, train: str, daemon: Daemon, tmp_path: Path) -> None:
    """Rank 0 looks before the others begin, and at each batch: every sample comes once an epoch, and no rank waits."""
    read = torchrun(LOOKING_JOB, train, daemon, tmp_path, scenario)
    whole = [epochs(dataset(train, daemon, rank), 2) for rank in range(WORLD)]
    assert [[sorted(each) for each in rank] for rank in read] == [[sorted(each) for each in rank] for rank in whole]
    assert [json.loads((tmp_path / f"{rank}.json").read_text())["warned"] for rank in range(WORLD)] == [[]] * WORLD


def test_epochs_that_all_ranks_leave_early_follow_each_other(train: str, daemon: Daemon, tmp_path: Path) -> None:
    """A loop of a fixed number of steps reads other samples in each epoch, on all ranks of the same one."""
    read = torchrun(LOOKING_JOB, train, daemon, tmp_path, "early")
    whole = [epochs(dataset(train, daemon, rank), 2) for rank in range(WORLD)]
    assert [set(read[rank][epoch]) <= set(whole[rank][epoch]) for rank in range(WORLD) for epoch in range(2)] == [
        True
    ] * (2 * WORLD)


def test_a_rank_that_is_killed_and_restarted(train: str, daemon: Daemon, tmp_path: Path) -> None:
    """torchrun starts both ranks anew, and each goes on from its own last state with the very next batch."""
    read = torchrun(RESTARTED_JOB, train, daemon, tmp_path)
    assert read == [epochs(dataset(train, daemon, rank), 2) for rank in range(WORLD)]


def test_ranks_killed_twice_read_every_sample_once(train: str, daemon: Daemon, tmp_path: Path) -> None:
    """Each restart continues at the step after the last checkpoint, with a process group and loader workers.

    torch reuses one key-value store for all restarts: a restarted rank may read the address that another had before,
    and wait for it for ever, with any dataset. The variable gives each restart a store of its own.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}", "--standalone"]
    job = [str(ELASTIC_JOB), str(daemon.socket), train, str(tmp_path)]
    run([*launch, "--max-restarts=2", *job], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    read = json.loads((tmp_path / "job.json").read_text())["read"]
    assert sorted(read) == [[epoch, f"{key:06d}"] for epoch in range(2) for key in range(sum(COUNTS))]


def run(command: list[str], **variables: str) -> None:
    """Run a job to its end."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.returncode == 0, done.stderr
