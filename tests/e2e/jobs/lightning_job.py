"""A job for `test_launchers`: two ranks of Lightning, whose loader is made before them.

    python lightning_job.py STRATEGY SOCKET URLS OUT_FOLDER

Each rank writes down what it was shown, by epoch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset

WORLD, BATCH = 2, 5


def keys(batch: list[dict[str, Any]]) -> list[str]:
    """Return the keys of a batch."""
    return [sample["__key__"] for sample in batch]


class Toy(LightningModule):
    """Learns nothing; keeps what it was shown."""

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = out
        self.net = torch.nn.Linear(1, 1)
        self.shown: list[list[str]] = []

    def on_train_epoch_start(self) -> None:
        """Begin an epoch."""
        self.shown.append([])

    def training_step(self, batch: list[str], number: int) -> torch.Tensor:
        """Take a batch."""
        self.shown[-1] += batch
        return self.net(torch.ones(1)).sum()

    def on_train_end(self) -> None:
        """Write down what was shown."""
        (Path(self.out) / f"{self.global_rank}.json").write_text(json.dumps(self.shown))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what learns."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Make the loader, and then the ranks."""
    strategy, daemon, urls, out = sys.argv[1:]
    dataset = ShardDataset(urls, shuffle=True, seed=7, batch_size=BATCH, socket=daemon)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_epochs=3,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(out), DataLoader(dataset, batch_size=BATCH, collate_fn=keys))


if __name__ == "__main__":
    main()
