"""`python -m campaign.restarts_job '{"urls": …}'`: reads epoch after epoch, and prints a line for every sample.

It ends when its standard input does, or after as many epochs as it is told.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from torch.utils.data import DataLoader

from shardcache_client import ShardDataset

MEMBER = "bin"


@dataclass(frozen=True, slots=True)
class Task:
    """Task of one process of the job."""

    socket: str  # the daemon's
    urls: str  # as a dataset takes them
    workers: int  # of the DataLoader; 0: none, and no loader
    period: int  # epochs that differ; those after them are the same again
    epochs: int | None  # how many to read; None: without end
    options: dict[str, Any]  # of the dataset

    def endless(self) -> Task:
        return replace(self, epochs=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_input, daemon=True).start()
    dataset = ShardDataset(task.urls, socket=task.socket, **task.options)
    samples: Iterable[dict[str, Any]] = dataset
    if task.workers:
        samples = DataLoader(dataset, batch_size=None, num_workers=task.workers)
    for epoch in count() if task.epochs is None else range(task.epochs):
        dataset.set_epoch(epoch % task.period)
        for sample in samples:
            print(sample["__key__"], zlib.crc32(sample[MEMBER]), flush=True)
        print("epoch", epoch % task.period, flush=True)


def _end_with_input() -> None:
    # Whoever disturbs this job may be killed itself; and in the middle of an epoch there is nothing to tidy up.
    os.read(0, 1)  # not sys.stdin: a forked worker closes that, and would wait for this thread's lock on it
    os._exit(0)


if __name__ == "__main__":
    main()
