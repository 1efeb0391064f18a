"""PyTorch Lightning with DDP: training, validation, and a checkpoint that knows where it was.

python with_lightning.py s3://bucket/train/ --validation s3://bucket/val/ --checkpoints saved

With `--checkpoints FOLDER` it saves every third step there; with `--resume FILE` it goes on where one was saved, also
with another number of `--devices`.
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

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


class Toy(LightningModule):
    """The toy model, and what it was shown."""

    def __init__(self, out: str | None) -> None:
        super().__init__()
        self.out = out
        self.net = nn.Linear(64, 10)
        self.shown: dict[str, list[list[str]]] = {"training": [], "validation": []}

    def training_step(self, batch: dict[str, Any], number: int) -> Tensor:
        """Learn from one batch."""
        self.shown["training"].append(batch["key"])
        return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

    def validation_step(self, batch: dict[str, Any], number: int) -> None:
        """Look at one batch."""
        self.shown["validation"].append(batch["key"])
        self.log(
            "val_loss",
            nn.functional.cross_entropy(self.net(batch["image"]), batch["label"]),
            sync_dist=True,
            batch_size=len(batch["key"]),
        )

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
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--validation", "--checkpoints", "--resume", "--devices"):
        parser.add_argument(option)
    args = parser.parse_args()
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
