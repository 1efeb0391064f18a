"""Saving in the middle of an epoch and going on there, also with another number of processes or workers.

torchrun --standalone --nproc-per-node 2 with_stateful_dataloader.py s3://bucket/train/ --stop-after 3 --save state.pt
torchrun --standalone --nproc-per-node 3 with_stateful_dataloader.py s3://bucket/train/ --resume state.pt --workers 1
"""

import argparse
import json
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache_client.dataset import ShardDataset

BATCH = 4


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the key, the first bytes of the image as if they were its pixels, and the class."""
    pixels = torch.frombuffer(bytearray(sample["jpg"][:64]), dtype=torch.uint8)
    return {"key": sample["__key__"], "image": pixels / 255, "label": int(sample["cls"])}


def report(name: str, batches: list[list[str]], out: str | None) -> None:
    """Print the number of this rank's batches; add their keys to a file, if one is named."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(f"{name}: {len(batches)} batches on rank {rank}", flush=True)
    if out:
        with open(out, "ab", buffering=0) as file:
            file.write(json.dumps({"name": name, "rank": rank, "batches": batches}).encode() + b"\n")


def main() -> None:
    """Read one epoch, or what is left of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--stop-after", "--save", "--resume", "--workers"):
        parser.add_argument(option)
    args = parser.parse_args()
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
