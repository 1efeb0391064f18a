"""Image classification with Lightning and DDP, resumed in the middle of an epoch."""

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from shardcache_client import ShardDataset

BATCH = 8
EPOCHS = 4


def prepare(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Return image and class: a crop that is random in training belongs here."""
    return sample["jpg"], sample["cls"]


def photos(split: str) -> ShardDataset[tuple[Tensor, int]]:
    """Return the dataset of a split: decoded images and classes."""
    decode = {"jpg": "torchrgb", "cls": int}
    dataset = ShardDataset("shards/index.json", shuffle=True, seed=7, decode=decode)
    train, validation = dataset.split(0.8, 0.2, seed=1)
    chosen = train if split == "train" else validation
    return chosen.map(prepare)


class Classifier(LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 16, 2),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Count right answers."""
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        """Stop in the middle of an epoch, as a preempted job does."""
        if self.global_step == self.trainer.stop_at:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what learns."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train; with `--resume`, from the last checkpoint on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--stop-at", type=int, help="step after which to stop, for the example")
    parser.add_argument("--resume", action="store_true", help="continue from saved/last.ckpt")
    args = parser.parse_args()
    seed_everything(7)
    # The loader's position is saved with the model: Lightning asks it for its state.
    saved = ModelCheckpoint("saved", every_n_train_steps=5, save_last=True, save_top_k=0)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=EPOCHS,
        callbacks=[saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.stop_at = args.stop_at
    train = photos("train").loader(batch_size=BATCH, num_workers=2, drop_last=True)
    validation = photos("validation").loader(batch_size=BATCH, num_workers=1)
    trainer.fit(Classifier(), train, validation, ckpt_path="last" if args.resume else None)
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics.get("accuracy", torch.nan)
        print(f"step {trainer.global_step}, epoch {trainer.current_epoch}: accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
