"""A training script, as a user writes it.

Only the dataset, and the loader's state in the checkpoint, are specific to shardcache.

shardcache index 's3://shapes/train-{0000..0011}.tar' -o index.json
torchrun --nproc-per-node=2 demo_training.py index.json --job first
"""

import argparse
import io
import json
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from shardcache_client.dataset import ShardDataset

BATCH_SIZE = 16


def decode(sample: dict[str, Any]) -> tuple[str, Tensor, int]:
    """Turn a sample into its key, its image (float32, 3 x height x width, 0 to 1) and its label."""
    image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(image.height, image.width, 3)
    return sample["__key__"], pixels.permute(2, 0, 1) / 255, int(sample["cls"])


def tiny_model(classes: int) -> nn.Module:
    """Return a convolutional network that trains in seconds on one core."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, classes),
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
) -> dict[str, Any]:
    """Train on the batches.

    Returns `keys`, those of the samples; `steps`, the number of batches; and `waited_s`, the time
    for which the training waited for data.
    """
    keys: list[str] = []
    steps = 0
    waited_s = 0.0
    remaining_batches = iter(batches)
    while True:
        start_s = time.perf_counter()
        batch = next(remaining_batches, None)
        waited_s += time.perf_counter() - start_s
        if batch is None:
            return {"keys": keys, "steps": steps, "waited_s": waited_s}
        batch_keys, images, labels = batch
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        keys += batch_keys
        steps += 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("urls")
    parser.add_argument("--job", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--stop-after",
        type=int,
        help="stop after this many batches of the last epoch",
    )
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("checkpoint.pt"),
        help="written by a run that stops",
    )
    parser.add_argument(
        "--reports",
        type=Path,
        default=Path(),
        help="folder for one JSON file per rank",
    )
    return parser.parse_args()


@record  # lets torchrun show which rank failed first, and how
def main() -> None:
    """Train, then write this rank's reports, one for each epoch."""
    args = _arguments()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(tiny_model(args.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    dataset = ShardDataset(
        args.urls,
        shuffle=True,
        shuffle_window=4,
        seed=args.seed,
        batch_size=BATCH_SIZE,
        decode=decode,
        job=args.job,
    )
    loader: Any = dataset.loader(num_workers=2)

    if args.checkpoint.exists():
        checkpoint = torch.load(args.checkpoint, weights_only=True)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])

    reports = []
    for epoch in range(loader.epoch, args.epochs):
        is_last = epoch == args.epochs - 1
        max_batches = args.stop_after if is_last else None
        # All ranks get the same number of batches, even of a partial epoch: no rank waits in a
        # collective operation for one that has ended.
        report = train(model, optimizer, islice(loader, max_batches))
        reports.append({"epoch": epoch, "promised": len(loader), **report})

    # All ranks are at the same batch, so one saves for all.
    if args.stop_after and dist.get_rank() == 0:
        checkpoint = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
        }
        torch.save(checkpoint, args.checkpoint)

    (args.reports / f"rank-{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
