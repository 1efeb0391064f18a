"""Hugging Face datasets: an IterableDataset with a shard for each worker of each process, which datasets shares out.

torchrun --standalone --nproc-per-node 2 with_datasets.py s3://bucket/train.json --checkpoints .
torchrun --standalone --nproc-per-node 2 with_datasets.py s3://bucket/train.json --resume epoch-1-step-3
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache_client.reader import ShardReader

BATCH = 4
EPOCHS = 3


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


WORKERS = 2  # per process


def read(urls: str, socket: str | None, epoch: int, reader: list[int], readers: int) -> Iterator[Any]:
    """Yield the samples of some of the epoch's readers: of one, in a worker."""
    for number in reader:
        shards = ShardReader(
            urls, shuffle=True, seed=7, batch_size=BATCH, socket=socket, rank=number, world_size=readers
        )
        shards.set_epoch(epoch)
        yield from shards


def main() -> None:
    """Train on what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--checkpoints", "--resume"):
        parser.add_argument(option)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    readers = processes * WORKERS
    saved = torch.load(f"{args.resume}-rank-{rank}.pt", weights_only=False) if args.resume else {"epoch": 0}
    net = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(saved["epoch"], EPOCHS):
        # datasets deals out lists among generators: each worker gets one number.
        options = {"urls": args.urls, "socket": args.socket, "epoch": epoch, "readers": readers}
        dataset = IterableDataset.from_generator(read, gen_kwargs=options | {"reader": list(range(readers))})
        dataset = split_dataset_by_node(dataset.map(decode), rank, processes)
        loader = StatefulDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
        if "loader" in saved:
            loader.load_state_dict(saved.pop("loader"))
        shown = []
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch["image"]), batch["label"]).backward()
            optimizer.step()
            shown.append(batch["key"])
            if args.checkpoints:
                state = {"epoch": epoch, "loader": loader.state_dict()}
                torch.save(state, f"{args.checkpoints}/epoch-{epoch}-step-{step + 1}-rank-{rank}.pt")
        report(f"epoch {epoch}", shown, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
