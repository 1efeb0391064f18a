"""A rank of a job for `test_launchers`, in which a rank looks at samples on its own, or all leave epochs early.

    torchrun … looking_job.py SCENARIO SOCKET URLS OUT_FOLDER

Each rank trains in step with the others and writes down what it read, by epoch, and its warnings; nobody sets the
epoch. SCENARIO: `look`, rank 0 looks at samples before the others begin, and while they read, through the dataset and
loaders; `own`, so it does while all read through the dataset's own loader; `early`, each epoch is left after four
batches.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset

BATCH, EPOCHS = 5, 2

warned: list[str] = []


def keys(batch: list[dict[str, Any]]) -> list[str]:
    """Return the keys of a batch."""
    return [sample["__key__"] for sample in batch]


def step() -> None:
    """Train in step: nobody is through before all have begun."""
    torch.distributed.barrier()


class Job:
    """One rank."""

    def __init__(self, scenario: str, daemon: str, urls: str, out: str) -> None:
        self.scenario, self.out = scenario, Path(out)
        self.rank = torch.distributed.get_rank()
        self.dataset = ShardDataset(urls, shuffle=True, seed=7, batch_size=BATCH, socket=daemon, timeout_s=60)
        self.loader: Any = DataLoader(self.dataset, batch_size=BATCH, num_workers=self.rank, collate_fn=keys)
        if scenario == "own":
            self.loader = self.dataset.loader(num_workers=self.rank, collate_fn=keys)
        self.read: list[list[str]] = []

    def look(self) -> None:
        """Look at samples on rank 0 alone."""
        if self.scenario != "early" and not self.rank:
            next(iter(self.dataset))
            next(iter(self.loader))
            next(iter(self.dataset.loader(batch_size=3, num_workers=1, collate_fn=keys)))

    def train(self) -> None:
        """Read all epochs."""
        for _ in range(EPOCHS):
            batches: list[list[str]] = []
            for batch in islice(self.loader, 4 if self.scenario == "early" else None):
                batches.append(batch)
                self.look()
                step()
            self.read.append([key for batch in batches for key in batch])
            step()
        (self.out / f"{self.rank}.json").write_text(json.dumps({"read": self.read, "warned": warned}))


def main() -> None:
    """Be one rank."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardcache").addHandler(handler)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    job = Job(*sys.argv[1:])
    job.look()
    step()
    job.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
