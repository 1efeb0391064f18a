"""A job for `test_launchers`: two ranks, started by a launcher, read datasets that were made before them.

    python launched_job.py LAUNCHER SOCKET URLS OUT_FOLDER STATE

Each rank writes down what it read, by scenario and epoch.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed
import torch.multiprocessing
from jobs import BATCH, shuffled
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset

WORLD = 2
Read = dict[str, list[list[str]]]
Datasets = dict[str, ShardDataset]


def make(daemon: str, urls: str, state: str) -> Datasets:
    """Make the datasets, in the process that launches the ranks."""

    datasets = {name: shuffled(urls, daemon) for name in ("counted", "resumed", "set")}
    datasets |= {name: shuffled(urls, daemon, zero_copy=True) for name in ("alone", "handed over")}
    datasets["resumed"].load_state_dict(json.loads(state))
    return datasets


def keys(batch: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return the keys of a batch, and its bytes, which so travel from a worker to its trainer."""
    return [(sample["__key__"], sample["bin"]) for sample in batch]


def epoch(dataset: ShardDataset, workers: int = 0, method: str | None = None) -> list[str]:
    """Read an epoch; check each sample's bytes, which hold its key."""
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=keys, multiprocessing_context=method)
    read = [pair for batch in loader for pair in batch]
    assert all(bytes(data[: len(key)]).decode() == key for key, data in read)
    return [key for key, _ in read]


def train(datasets: Datasets, out: str) -> None:
    """Be one rank, once torch.distributed is initialised."""
    method = "spawn" if sys.argv[1] == "fork" else "fork"
    rank = torch.distributed.get_rank()
    read: Read = {
        "counted": [epoch(datasets["counted"], workers) for workers in (0, 0, 2)],
        "resumed": [epoch(datasets["resumed"]) for _ in range(2)],
        "alone": [epoch(datasets["alone"])],
        "handed over": [epoch(datasets["handed over"], 1, method)],
        "set": [],
    }
    for turn in range(WORLD):  # one rank is through before the other has begun
        if turn == rank:
            for number in range(2):
                datasets["set"].set_epoch(number)
                read["set"].append(epoch(datasets["set"]))
        torch.distributed.barrier()
    (Path(out) / f"{rank}.json").write_text(json.dumps(read))


def meet_and_train(rank: int, datasets: Datasets, out: str) -> None:
    """Be one rank of torch.multiprocessing's."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=WORLD)
    train(datasets, out)
    torch.distributed.destroy_process_group()


def accelerated(datasets: Datasets, out: str) -> None:
    """Be one rank of Accelerate's."""
    from accelerate import PartialState

    state = PartialState(cpu=True)
    train(datasets, out)
    state.destroy_process_group()


def spawn(datasets: Datasets, out: str) -> None:
    """torch.multiprocessing.spawn."""
    torch.multiprocessing.spawn(meet_and_train, args=(datasets, out), nprocs=WORLD)


def fork(datasets: Datasets, out: str) -> None:
    """torch.multiprocessing.start_processes, forking."""
    torch.multiprocessing.start_processes(meet_and_train, args=(datasets, out), nprocs=WORLD, start_method="fork")


def notebook(datasets: Datasets, out: str) -> None:
    """Accelerate's notebook_launcher."""
    from accelerate import notebook_launcher

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    notebook_launcher(accelerated, (datasets, out), num_processes=WORLD, use_port=port)


LAUNCHERS: dict[str, Callable[[Datasets, str], None]] = {
    "spawn": spawn,
    "fork": fork,
    "notebook": notebook,
}


if __name__ == "__main__":
    launcher, daemon, urls, out, state = sys.argv[1:]
    LAUNCHERS[launcher](make(daemon, urls, state), out)
