"""Shared by the examples: the command line, a toy model for any images, and a log line per epoch about the samples."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BATCH = 4
EPOCHS = 3
PIXELS = 64


def arguments(*more: str) -> argparse.Namespace:
    """Return what the command line says: the shards, the daemon's socket, and further options by their names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls, such as 's3://bucket/{000..099}.tar'")
    parser.add_argument("--out", help="a file to which the keys of all ranks are added, a JSON line a report")
    for option in ("--socket", *more):
        parser.add_argument(option)
    return parser.parse_args()


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the key, the first bytes of the image as if they were its pixels, and the class."""
    pixels = torch.frombuffer(bytearray(sample["jpg"][:PIXELS]), dtype=torch.uint8)
    return {"key": sample["__key__"], "image": pixels / 255, "label": int(sample["cls"])}


def model() -> nn.Module:
    """Return a model of the toy images."""
    return nn.Linear(PIXELS, 10)


def loss_of(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return how wrong the model is about a batch."""
    return nn.functional.cross_entropy(net(batch["image"]), batch["label"])


def report(name: str, batches: Sequence[Sequence[str]], out: str | None) -> None:
    """Print, on rank 0, how many steps each rank took, and how many samples they read.

    Args:
        batches: the keys of each batch of this rank.
    """
    ranks: list[Any] = [[list(keys) for keys in batches]]
    if dist.is_initialized():  # some frameworks do without it for a single process
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, ranks[0])
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(name, ranks, out)
    if dist.is_initialized():
        dist.barrier()  # the report is written before any rank goes on, or ends


def _write(name: str, ranks: list[list[list[str]]], out: str | None) -> None:
    reads = [key for rank in ranks for keys in rank for key in keys]
    print(f"{name}: steps {[len(rank) for rank in ranks]}, {len(set(reads))} samples, {len(reads)} reads", flush=True)
    if out:
        with Path(out).open("a") as file:
            print(json.dumps({"name": name, "ranks": ranks}), file=file)
