"""Plain PyTorch over several processes.

torchrun --standalone --nproc-per-node 2 with_torchrun.py s3://bucket/train/
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

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
    for option in ("--socket", "--out"):
        parser.add_argument(option)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    dataset = ShardDataset(args.urls, shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=args.socket)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=2, persistent_workers=True)
    net = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        shown = []
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch["image"]), batch["label"]).backward()
            optimizer.step()
            shown.append(batch["key"])
        report(f"epoch {epoch}", shown, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
