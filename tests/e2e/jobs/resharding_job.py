"""One rank of two, for `test_resharding`: asks for samples through Accelerate and writes down what came of it.

    torchrun --nproc-per-node 2 resharding_job.py SOCKET INDEX OUT_FOLDER

Each line is a JSON object: the case's name, the keys that came, and the error's class and text, if there was one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client import ShardDataset

Make = Callable[..., ShardDataset]


def decode(sample: dict[str, Any]) -> torch.Tensor:
    """Return the sample's number, for a dispatcher sends tensors alone."""
    return torch.tensor(int(sample["__key__"]))


def keys_of(make: Make, *, dispatch: bool, workers: int, method: str | None = None, **ranks: int) -> list[int]:
    """Read an epoch through `accelerator.prepare`."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    dataset = make(**ranks)
    loader = DataLoader(dataset, batch_size=5, num_workers=workers, multiprocessing_context=method)
    return [int(number) for batch in accelerator.prepare(loader) for number in batch]


def gathered(make: Make) -> list[int]:
    """Read an epoch by a loader that is left out of `accelerator.prepare`, and gather it as metrics are."""
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(make(), batch_size=7)
    return [int(number) for batch in loader for number in accelerator.gather_for_metrics(batch)]


CASES: dict[str, Callable[[Make], list[int]]] = {
    "sharded": partial(keys_of, dispatch=False, workers=0),
    "sharded, with a worker": partial(keys_of, dispatch=False, workers=1),
    "dispatched": partial(keys_of, dispatch=True, workers=0),
    "dispatched, with a worker": partial(keys_of, dispatch=True, workers=1),
    "dispatched, with a spawned worker": partial(keys_of, dispatch=True, workers=1, method="spawn"),
    "every rank reads all, sharded": partial(keys_of, dispatch=False, workers=0, rank=0, world_size=1),
    "every rank reads all, dispatched": partial(keys_of, dispatch=True, workers=1, rank=0, world_size=1),
    "not prepared, gathered": gathered,
}


def main() -> None:
    """Run every case."""
    socket, index, out = sys.argv[1:]
    make = partial(ShardDataset, index, socket=socket, batch_size=5, decode=decode)
    rank = Accelerator(cpu=True).process_index
    with (Path(out) / f"{rank}.jsonl").open("w") as file:
        for name, case in CASES.items():
            row: dict[str, Any] = {"name": name, "keys": [], "error": None}
            try:
                row["keys"] = case(make)
            except ConfigError as exn:
                row["error"] = str(exn)
            print(json.dumps(row), file=file)
    # A thread of the process group that frees a tensor while the interpreter ends would abort it (pytorch#190489).
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
