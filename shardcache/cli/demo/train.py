"""A training script as its user writes it: the only line about shardcache is the one that makes the dataset.

torchrun --nproc-per-node=2 train.py 's3://shapes/train-{0000..0011}.tar' --job first
"""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset

Batch = tuple[list[str], Tensor, Tensor]


def decode(samples: list[dict[str, Any]]) -> Batch:
    """Turn samples into keys, images (float32, N x 3 x height x width, 0 to 1) and labels (int64, N)."""
    images = [Image.open(io.BytesIO(sample["jpg"])).convert("RGB") for sample in samples]
    pixels = [torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8).view(i.height, i.width, 3) for i in images]
    labels = torch.tensor([int(sample["cls"]) for sample in samples])
    return [sample["__key__"] for sample in samples], torch.stack(pixels).permute(0, 3, 1, 2) / 255, labels


def tiny_model(classes: int) -> nn.Module:
    """Return a convolutional network that one core trains in seconds."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, classes),
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> dict[str, Any]:
    """Train on what the loader gives; return the keys seen, the mean loss and the seconds spent waiting for data."""
    keys: list[str] = []
    loss_sum = waited_s = 0.0
    # Whole shards are dealt to ranks, so that one rank may have a batch more than the other. Join answers the
    # collectives for a rank that is through; without it the others would wait for that rank for ever.
    with Join([model]):  # type: ignore[list-item]  # DistributedDataParallel is Joinable
        batches = iter(loader)
        while True:
            asked_s = time.perf_counter()
            batch = next(batches, None)
            waited_s += time.perf_counter() - asked_s
            if batch is None:
                return {"keys": keys, "loss": loss_sum / max(len(keys), 1), "waited_s": waited_s}
            batch_keys, images, labels = batch
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            keys += batch_keys
            loss_sum += loss.item() * len(batch_keys)


@record  # lets torchrun show which rank failed first, and how
def main() -> None:
    """Train, then write what this rank saw in each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls")
    parser.add_argument("--job", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--reports", type=Path, default=Path(), help="folder for a JSON file of each rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(tiny_model(args.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    dataset = ShardDataset(args.urls, shuffle=True, seed=args.seed, job=args.job)
    loader = DataLoader(dataset, batch_size=16, collate_fn=decode, num_workers=2, persistent_workers=True)

    epochs = []
    for epoch in range(args.epochs):
        dataset.set_epoch(epoch)
        epochs.append(train_epoch(model, optimizer, loader))

    (args.reports / f"rank-{dist.get_rank()}.json").write_text(json.dumps(epochs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
