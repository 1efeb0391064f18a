"""Jobs of two ranks under each launcher: every sample once, rank by rank, epoch by epoch."""

import json
import os
from collections import deque
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing
from accelerate import PartialState, notebook_launcher
from jobs import (
    BATCH,
    elastic,
    leave_early,
    leave_out_of_step,
    look,
    meet,
    shuffled,
    take_last_batches,
)
from torch.utils.data import DataLoader

from shardcache_client.dataset import ShardDataset
from support.network.ports import free_port
from support.programs.daemon import Daemon
from support.programs.ranks import processes, torchrun
from support.shards.reading import keys_of, write_index
from support.shards.tars import make_tar

pytestmark = pytest.mark.slow

COUNTS = (7, 12, 1, 20, 5, 15)
WORLD = 2


@pytest.fixture(scope="module")
def train(folder: Path) -> str:
    """The index file of 60 samples whose bytes begin with their keys."""
    source = folder / "train"
    first = 0
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


Datasets = dict[str, ShardDataset]


def keys(batch: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return the keys of a batch, and its bytes, which so travel from a worker to its trainer."""
    return [(sample["__key__"], sample["bin"]) for sample in batch]


def epoch(dataset: ShardDataset, workers: int = 0, method: str | None = None) -> list[str]:
    """Read an epoch; check each sample's bytes, which hold its key."""
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=keys,
        multiprocessing_context=method,
    )
    read = [pair for batch in loader for pair in batch]
    assert all(bytes(data[: len(key)]).decode() == key for key, data in read)
    return [key for key, _ in read]


def read_in_turn(datasets: Datasets, method: str) -> dict[str, list[list[str]]]:
    """Be one rank, with torch.distributed initialised; return its samples by scenario."""
    read: dict[str, list[list[str]]] = {
        "counted": [epoch(datasets["counted"], workers) for workers in (0, 0, 2)],
        "resumed": [epoch(datasets["resumed"]) for _ in range(2)],
        "alone": [epoch(datasets["alone"])],
        "handed over": [epoch(datasets["handed over"], 1, method)],
        "set": [],
    }
    for turn in range(WORLD):  # one rank is through before the other has begun
        if turn == dist.get_rank():
            for number in range(2):
                datasets["set"].set_epoch(number)
                read["set"].append(epoch(datasets["set"]))
        dist.barrier()
    return read


def rank_of_torch(rank: int, datasets: Datasets, out: str, method: str) -> None:
    """Be one rank of torch.multiprocessing's."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    meet(f"file://{out}/meet", rank, WORLD)
    Path(out, f"{rank}.json").write_text(json.dumps(read_in_turn(datasets, method)))
    dist.destroy_process_group()


def rank_of_accelerate(datasets: Datasets, out: str, method: str) -> None:
    """Be one rank of Accelerate's."""
    state = PartialState(cpu=True)
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(read_in_turn(datasets, method)))
    state.destroy_process_group()


def launch(launcher: str, socket: str, urls: str, out: str, state: str) -> None:
    """Make datasets, one with a state, and have a launcher start the ranks that share them."""
    datasets = {name: shuffled(urls, socket) for name in ("counted", "resumed", "set")}
    datasets |= {name: shuffled(urls, socket, zero_copy=True) for name in ("alone", "handed over")}
    datasets["resumed"].load_state_dict(json.loads(state))
    if launcher == "notebook":
        port = str(free_port())
        notebook_launcher(
            rank_of_accelerate, (datasets, out, "fork"), num_processes=WORLD, use_port=port
        )
    else:
        method = "spawn" if launcher == "fork" else "fork"  # of workers, unlike that of ranks
        torch.multiprocessing.start_processes(
            rank_of_torch, args=(datasets, out, method), nprocs=WORLD, start_method=launcher
        )


@pytest.mark.parametrize("launcher", ["spawn", "fork", "notebook"])
def test_ranks_that_share_a_dataset_made_before_them(
    launcher: str, train: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Epochs and values are handled as if each rank had made the dataset for itself."""
    ranks = [dataset(train, daemon, rank) for rank in range(WORLD)]
    stopped = dataset(train, daemon, 0).loader(num_workers=0, collate_fn=list)
    deque(islice(stopped, 2), maxlen=0)
    processes(
        launch, [(launcher, daemon.socket, train, tmp_path, json.dumps(stopped.state_dict()))]
    )
    expected = [epochs(ds, 3) for ds in ranks]
    assert sorted(key for rank in expected for key in rank[0]) == [
        f"{key:06d}" for key in range(sum(COUNTS))
    ]
    for rank, read in enumerate(expected):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["counted"][:2] == read[:2]
        assert sorted(told["counted"][2]) == sorted(read[2]), "by two workers in turn"
        assert told["resumed"] == [read[0][2 * BATCH :], read[1]]
        assert told["set"] == read[:2]
        assert told["alone"] == told["handed over"] == read[:1]


def test_a_rank_that_looks_on_its_own(train: str, daemon: Daemon) -> None:
    """Rank 0 looks alone, first and at each batch. Samples come once, and no rank waits."""
    for rank, told in enumerate(torchrun(look, daemon.socket, train)):
        assert list(map(sorted, told["read"])) == list(
            map(sorted, epochs(dataset(train, daemon, rank), 2))
        )
        assert told["warned"] == []


def test_ranks_that_leave_their_loops_read_one_epoch_after_another(
    train: str, daemon: Daemon
) -> None:
    """As `set_epoch` reads them, whether the iterator is dropped or kept."""
    for read in torchrun(leave_early, daemon.socket, train):
        assert read["broken"] == read["set"]
        assert read["kept"] == read["set"]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_that_leave_out_of_step_read_one_epoch_after_another(
    train: str, daemon: Daemon, workers: int
) -> None:
    """A rank that is through first waits until the other has begun the epoch and left it, too."""
    for rank, begun in enumerate(torchrun(leave_out_of_step, daemon.socket, train, workers)):
        reference = dataset(train, daemon, rank)
        loader = DataLoader(reference, batch_size=BATCH, num_workers=workers, collate_fn=keys_of)
        for number, batch in enumerate(begun):
            reference.set_epoch(number)
            assert batch == next(iter(loader))


def test_ranks_that_count_their_batches_read_one_epoch_after_another(
    train: str, daemon: Daemon
) -> None:
    """No rank asks for the end of an epoch, even one of one batch or with one batch left."""
    ranks = torchrun(take_last_batches, daemon.socket, train)
    for read in ranks:
        assert read["resumed"] == [read["set"][0][-1:], *read["set"][1:]]
    for epoch in range(3):
        for read in ranks:
            (batch,) = read["single"][epoch]
            assert batch == list(chain(*read["set"][epoch]))


def test_ranks_killed_twice_read_every_sample_once(
    train: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Each restart, with a process group and loader workers, continues after the last checkpoint.

    torch reuses one key-value store for all restarts: a restarted rank may read the address that
    another had before, and wait for it for ever, with any dataset. The variable gives each restart
    a store of its own.
    """
    restarts = ["--max-restarts=2"]
    torchrun(
        elastic,
        daemon.socket,
        train,
        tmp_path,
        options=restarts,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    read = json.loads((tmp_path / "job.json").read_text())["read"]
    assert sorted(read) == [
        [epoch, f"{key:06d}"] for epoch in range(2) for key in range(sum(COUNTS))
    ]
