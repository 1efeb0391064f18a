"""torchdata.nodes: a pipeline of nodes over the dataset, saved and resumed in the middle of an epoch.

torchrun --standalone --nproc-per-node 2 with_torchdata_nodes.py s3://bucket/train.json --checkpoints .
torchrun --standalone --nproc-per-node 2 with_torchdata_nodes.py s3://bucket/train.json --resume step-9.pt
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper, Prefetcher

from shardcache_client.dataset import ShardDataset

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


def main() -> None:
    """Train on what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--checkpoints", "--resume"):
        parser.add_argument(option)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    dataset = ShardDataset(args.urls, shuffle=True, seed=7, batch_size=BATCH, socket=args.socket)
    # Threads decode: the dataset itself stays in this process, and IterableWrapper saves its state.
    samples = ParallelMapper(IterableWrapper(dataset), decode, num_workers=4)
    loader = Loader(Prefetcher(Mapper(Batcher(samples, BATCH, drop_last=False), default_collate), prefetch_factor=2))
    if args.resume:
        loader.load_state_dict(torch.load(args.resume, weights_only=True))
    net = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = 0
    batches = iter(loader)  # restores the dataset's state, and with it the epoch
    first = dataset.epoch
    for epoch in range(first, EPOCHS):
        if epoch > first:
            batches = iter(loader)  # not beyond the last epoch: threads would still be reading when the process exits
        shown = []
        for batch in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch["image"]), batch["label"]).backward()
            optimizer.step()
            shown.append(batch["key"])
            step += 1
            if args.checkpoints and dist.get_rank() == 0:  # its state speaks for all
                torch.save(loader.state_dict(), f"{args.checkpoints}/step-{step}.pt")
        report(f"epoch {epoch}", shown, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
