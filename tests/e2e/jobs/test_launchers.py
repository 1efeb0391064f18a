"""Jobs of two ranks under each launcher: every sample once, rank by rank, epoch by epoch."""

import json
import subprocess
import sys
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from jobs import BATCH, elastic, look, shuffled
from jobs import train as trained

from shardcache_client import ShardDataset
from support.programs.cli import clean_environment
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.ranks import processes, torchrun
from support.shards.reading import keys_of, write_index
from support.shards.tars import make_tar

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("launched_job.py")
COUNTS = (7, 12, 1, 20, 5, 15)
WORLD = 2


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
    return write_index(source, COUNTS)


def dataset(train: str, daemon: Daemon, rank: int) -> ShardDataset:
    """Return the job's dataset, as a process that is started as that rank makes it for itself."""
    return shuffled(train, daemon.socket, rank=rank, world_size=WORLD)


def epochs(ds: ShardDataset, number: int) -> list[list[str]]:
    """Read so many epochs."""
    return [keys_of(ds) for _ in range(number)]


@pytest.mark.parametrize("launcher", ["spawn", "fork", "notebook"])
def test_ranks_that_share_a_dataset_made_before_them(launcher: str, train: str, daemon: Daemon, tmp_path: Path) -> None:
    """Epochs are counted, set and resumed, and values handed over, as if each rank had made the dataset for itself."""
    ranks = [dataset(train, daemon, rank) for rank in range(WORLD)]
    expected = [epochs(ds, 3) for ds in ranks]
    assert sorted(key for rank in expected for key in rank[0]) == [f"{key:06d}" for key in range(sum(COUNTS))]
    for told, read in zip(launch(launcher, train, daemon, tmp_path), expected, strict=True):
        assert told["counted"][:2] == read[:2]
        assert sorted(told["counted"][2]) == sorted(read[2]), "by two workers in turn"
        assert told["resumed"] == [read[0][2 * BATCH :], read[1]]
        assert told["set"] == read[:2]
        assert told["alone"] == told["handed over"] == read[:1]


def launch(launcher: str, train: str, daemon: Daemon, out: Path) -> list[Any]:
    """Run the job of two ranks that share datasets, one with the state after two batches; return what each read."""
    stopped = dataset(train, daemon, 0).loader(num_workers=0, collate_fn=list)
    deque(islice(stopped, 2), maxlen=0)
    state = json.dumps(stopped.state_dict())
    command = [sys.executable, str(JOB), launcher, str(daemon.socket), train, str(out), state]
    env = clean_environment({"OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("scenario", ["look", "own"])
def test_a_rank_that_looks_on_its_own(scenario: str, train: str, daemon: Daemon) -> None:
    """Rank 0 looks before the others begin, and at each batch: every sample comes once an epoch, and no rank waits."""
    for rank, told in enumerate(torchrun(look, daemon.socket, train, scenario)):
        assert list(map(sorted, told["read"])) == list(map(sorted, epochs(dataset(train, daemon, rank), 2)))
        assert told["warned"] == []


def test_epochs_that_all_ranks_leave_early_follow_each_other(train: str, daemon: Daemon) -> None:
    """A loop of a fixed number of steps reads other samples in each epoch, on all ranks of the same one."""
    for rank, told in enumerate(torchrun(look, daemon.socket, train, "early")):
        for read, whole in zip(told["read"], epochs(dataset(train, daemon, rank), 2), strict=True):
            assert set(read) <= set(whole)


def test_ranks_killed_twice_read_every_sample_once(train: str, daemon: Daemon, tmp_path: Path) -> None:
    """Each restart continues at the step after the last checkpoint, with a process group and loader workers.

    torch reuses one key-value store for all restarts: a restarted rank may read the address that another had before,
    and wait for it for ever, with any dataset. The variable gives each restart a store of its own.
    """
    restarts = ["--max-restarts=2"]
    torchrun(elastic, daemon.socket, train, tmp_path, options=restarts, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    read = json.loads((tmp_path / "job.json").read_text())["read"]
    assert sorted(read) == [[epoch, f"{key:06d}"] for epoch in range(2) for key in range(sum(COUNTS))]


def test_workers_of_ranks_that_only_torch_distributed_knows(
    daemon: Daemon, index: str, keys: list[str], tmp_path: Path
) -> None:
    """Ranks reach forked workers, and spawned ones, which never initialise it; each reads half of every epoch."""
    meeting = f"file://{tmp_path}/meet"
    arguments = [(daemon.socket, index, method, meeting, rank, WORLD) for rank, method in enumerate(["fork", "spawn"])]
    ranks = processes(trained, arguments)
    for epoch in range(2):
        assert sorted(key for rank in ranks for key in rank[epoch]) == keys
        assert [len(rank[epoch]) for rank in ranks] == [len(keys) // 2] * 2
    assert sorted(ranks[0][0]) != sorted(ranks[0][1]), "other samples, too: ranks take parts of one sequence"
