"""PyTorch Lightning with DDP: training, validation, and a checkpoint that knows where it was.

python with_lightning.py 's3://bucket/train-{000000..000999}.tar' --validation 's3://bucket/val-{000000..000009}.tar'

With `--checkpoints FOLDER` it saves every third step there; with `--resume FILE` it goes on where one was saved, also
with another number of `--devices`.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from toy import BATCH, EPOCHS, arguments, decode, loss_of, model, report

from shardcache_client import ShardDataset


class Toy(LightningModule):
    """The toy model, and what it was shown."""

    def __init__(self, out: str | None) -> None:
        super().__init__()
        self.out = out
        self.net = model()
        self.shown: dict[str, list[list[str]]] = {"training": [], "validation": []}

    def training_step(self, batch: dict[str, Any], number: int) -> Tensor:
        """Learn from one batch."""
        self.shown["training"].append(batch["key"])
        return loss_of(self.net, batch)

    def validation_step(self, batch: dict[str, Any], number: int) -> None:
        """Look at one batch."""
        self.shown["validation"].append(batch["key"])
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True, batch_size=len(batch["key"]))

    def on_train_epoch_end(self) -> None:
        """Tell what an epoch was made of."""
        self.tell("training")

    def on_validation_epoch_end(self) -> None:
        """Tell what a round of validation was made of."""
        if not self.trainer.sanity_checking:
            self.tell("validation")
        self.shown["validation"].clear()

    def tell(self, kind: str) -> None:
        """Print what was shown since the last time."""
        report(f"epoch {self.current_epoch} {kind}", self.shown[kind], self.out)
        self.shown[kind].clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what learns."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train on what the command line names."""
    args = arguments("--validation", "--checkpoints", "--resume", "--devices")
    common: dict[str, Any] = {"batch_size": BATCH, "decode": decode, "socket": args.socket}
    training = ShardDataset(args.urls, shuffle=True, seed=7, **common)
    validation = ShardDataset(args.validation, **common)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(args.devices or 2),
        strategy="ddp",
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(args.checkpoints, every_n_train_steps=3, save_top_k=-1)] if args.checkpoints else [],
        enable_checkpointing=bool(args.checkpoints),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(args.out), training.loader(num_workers=2), validation.loader(num_workers=1), ckpt_path=args.resume)


if __name__ == "__main__":
    main()
