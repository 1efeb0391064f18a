"""A Lightning model that notes its batches, to be imported in a fixture, as Lightning is slow."""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

Batch = list[str]


class Recorder(lightning.LightningModule):
    """A model of one number.

    Attributes:
        read: the batches of each epoch of training.
    """

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.read: list[list[Batch]] = [[] for _ in range(epochs)]

    def training_step(self, batch: Batch, _index: int) -> torch.Tensor:
        """Note a batch."""
        self.read[self.current_epoch].append(batch)
        return self.weight.sum()

    def validation_step(self, _batch: Batch, _index: int) -> None:
        """Look at a batch."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return any optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(epochs: int, *callbacks: lightning.Callback, **options: Any) -> lightning.Trainer:
    """Return a trainer that writes nothing but what the callbacks do."""
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def saver(folder: Path, steps: int) -> ModelCheckpoint:
    """Return a callback that saves `step=N.ckpt` after each so many steps."""
    return ModelCheckpoint(folder, every_n_train_steps=steps, save_top_k=-1, filename="{step}")
