"""The program that the example's Job runs on each GPU; without GPUs it trains on CPUs."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shardcache_client.dataset import ShardDataset

EPOCHS = 2
BATCH = 32
FEATURES = 64


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the image's first bytes as if they were features, and the class: put your own here."""
    pixels = torch.frombuffer(bytearray(sample["jpg"][:FEATURES]), dtype=torch.uint8)
    return pixels / 255, int(sample["cls"])


def main(urls: str) -> None:
    """Train, and print what each epoch took; each rank reads its part of each epoch."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dataset = ShardDataset(urls, shuffle=True, seed=7, batch_size=BATCH, decode=decode)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=2, persistent_workers=True)
    model = DistributedDataParallel(nn.Linear(FEATURES, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        read = torch.zeros(1, device=device)
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features.to(device)), labels.to(device)).backward()
            optimizer.step()
            read += len(labels)
        dist.all_reduce(read)
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            print(f"epoch {epoch}: {int(read)} samples on {ranks} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
