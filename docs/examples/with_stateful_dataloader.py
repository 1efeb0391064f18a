"""Saving in the middle of an epoch and going on there, also with another number of processes or workers.

torchrun --nproc-per-node 2 with_stateful_dataloader.py URLS --stop-after 3 --save state.pt
torchrun --nproc-per-node 3 with_stateful_dataloader.py URLS --resume state.pt --workers 1
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from toy import BATCH, arguments, decode, report

from shardcache_client import ShardDataset


def main() -> None:
    """Read one epoch, or what is left of it."""
    args = arguments("--stop-after", "--save", "--resume", "--workers")
    dist.init_process_group("gloo")
    dataset = ShardDataset(args.urls, shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=args.socket)
    if args.resume:
        # The states of all ranks, given to the dataset and not to the loader, which wants its own workers back.
        dataset.load_state_dict(torch.load(args.resume, weights_only=True))
    loader = StatefulDataLoader(dataset, batch_size=BATCH, num_workers=int(args.workers or 2))
    batches = list(islice(loader, int(args.stop_after) if args.stop_after else None))
    if args.save:
        save(loader.state_dict(), args.save)
    report("read", [batch["key"] for batch in batches], args.out)
    dist.destroy_process_group()


def save(state: dict[str, Any], path: str) -> None:
    """Write the states of all ranks to one file."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    if dist.get_rank() == 0:
        torch.save({"ranks": states}, path)


if __name__ == "__main__":
    main()
