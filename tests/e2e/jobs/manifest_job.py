"""One rank of a job for `test_one_manifest`, which meets the others as told and writes down what it read.

    python manifest_job.py URLS SOCKET OUT_FILE WHEN WORKERS INIT_METHOD RANK WORLD_SIZE

WHEN: `early`, torch.distributed is initialised before the dataset is made; `late`, after; `alone`, before, and only the
last rank makes a dataset; `drawn`, before, and the seed is drawn; `split`, before, and all read the same part of a
split; `astray`, before, and each splits by a seed of its own. WORKERS: `fork` or `spawn`, two of them, or `none`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed
from torch.utils.data import DataLoader

from shardcache.errors import ShardcacheError
from shardcache_client import ShardDataset


def main() -> None:
    """Run the rank."""
    urls, socket, out, when, workers, init_method, rank, world_size = sys.argv[1:]
    if when != "late":
        meet(init_method, int(rank), int(world_size))
    told: dict[str, object] = {"keys": None, "error": None}
    try:
        if when != "alone" or int(rank) == int(world_size) - 1:
            options = {"shuffle": True, "seed": None} if when == "drawn" else {}
            ds = ShardDataset(urls, even=None, socket=socket, timeout_s=3 if when == "alone" else 60, **options)
            if when == "split":
                ds = ds.split(0.5, 0.5)[0]
            if when == "astray":
                ds = ds.split(0.5, 0.5, seed=int(rank))[0]
        if when == "late":
            meet(init_method, int(rank), int(world_size))
        if when != "alone":
            told["keys"] = [sample["__key__"] for sample in loader_of(ds, workers)]
    except ShardcacheError as exn:
        told["error"] = f"{type(exn).__name__}: {exn}"
    Path(out).write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def meet(init_method: str, rank: int, world_size: int) -> None:
    """Initialise torch.distributed."""
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)


def loader_of(ds: ShardDataset, workers: str) -> DataLoader[object]:
    """Return a loader with workers that start as told."""
    if workers == "none":
        return DataLoader(ds, batch_size=None)
    return DataLoader(ds, batch_size=None, num_workers=2, multiprocessing_context=workers)


if __name__ == "__main__":
    main()
