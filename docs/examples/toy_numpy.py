"""Shared by the examples that do without torch: the command line, batches of NumPy arrays, and a log line per epoch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardcache_client import ShardReader

BATCH = 4
EPOCHS = 3
PIXELS = 64


def arguments(*more: str) -> argparse.Namespace:
    """Return what the command line says: the shards, the daemon's socket, and further options by their names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls, such as 's3://bucket/{000..099}.tar'")
    parser.add_argument("--out", help="a file to which the keys are added, a JSON line a report")
    for option in ("--socket", *more):
        parser.add_argument(option)
    return parser.parse_args()


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the key, the first bytes of the image as if they were its pixels, and the class."""
    pixels = np.frombuffer(sample["jpg"][:PIXELS], np.uint8)
    return {"key": sample["__key__"], "image": pixels.astype(np.float32) / 255, "label": int(sample["cls"])}


def batches(reader: ShardReader) -> Iterator[dict[str, Any]]:
    """Yield the batches of an epoch: a list for each field, and the reader's state after the batch.

    The state comes with its batch because frameworks take batches ahead of the training loop.
    """
    samples = iter(reader)
    while batch := list(islice(samples, BATCH)):
        yield {name: [sample[name] for sample in batch] for name in batch[0]} | {
            "state": json.dumps(reader.state_dict())
        }


def save(state: str, folder: str | None, step: int) -> None:
    """Write the state after a step, as a training script would along with the model."""
    if folder:
        Path(folder, f"step-{step}.json").write_text(state)


def load(reader: ShardReader, path: str | None) -> None:
    """Resume from a saved state, if there is one."""
    if path:
        reader.load_state_dict(json.loads(Path(path).read_text()))


def report(name: str, batches: Sequence[Sequence[str]], out: str | None) -> None:
    """Print how many steps this process took, and how many samples it read.

    Args:
        batches: the keys of each batch.
    """
    print(f"{name}: {len(batches)} steps, {sum(map(len, batches))} samples", flush=True)
    if out:
        with Path(out).open("a") as file:
            print(json.dumps({"name": name, "ranks": [[list(keys) for keys in batches]]}), file=file)
