"""A rank of a job for `test_launchers`, in which a rank looks at samples on its own, or all leave epochs early.

    torchrun … looking_job.py SCENARIO SOCKET URLS OUT_FOLDER

Each rank trains in step with the others and writes down what it read, by epoch; nobody sets the epoch. SCENARIO:
`look`, rank 0 looks at a sample before the others begin, and once they have begun; `early`, each epoch is left after
three batches.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset

BATCH, EPOCHS = 5, 2


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
        self.dataset = ShardDataset(
            urls, shuffle=True, seed=7, batch_size=BATCH, socket=daemon, timeout_s=4 if scenario == "look" else 60
        )
        self.loader = DataLoader(self.dataset, batch_size=BATCH, num_workers=self.rank, collate_fn=keys)
        self.read: list[list[str]] = []

    def train(self) -> None:
        """Read all epochs."""
        for epoch in range(EPOCHS):
            batches: list[list[str]] = []
            if self.scenario == "look" and epoch and not self.rank:
                next(iter(self.dataset))
            for batch in islice(self.loader, 3 if self.scenario == "early" else None):
                batches.append(batch)
                step()
            self.read.append([key for batch in batches for key in batch])
            step()
        (self.out / f"{self.rank}.json").write_text(json.dumps({"read": self.read}))


def main() -> None:
    """Be one rank."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    job = Job(*sys.argv[1:])
    if job.scenario == "look" and not job.rank:
        next(iter(job.dataset))
    step()
    job.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
