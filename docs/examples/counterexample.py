"""The fault that `with_lightning.py` avoids: the same training by webdataset alone, over shards of uneven sizes.

python counterexample.py '/data/train-{000000..000006}.tar'

Each rank opens shards of its own, and so takes as many steps as their samples happen to allow. The rank that is through
first goes on to what comes after an epoch, while the other one waits for its gradients: until the time-out, which is
half an hour in practice and twenty seconds here.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import webdataset as wds
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import default_collate

BATCH = 4


class Toy(LightningModule):
    """A toy model of the first bytes of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)

    def training_step(self, batch: dict[str, Any], number: int) -> Tensor:
        """Learn from one batch."""
        return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what learns."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the first bytes of the image as if they were its pixels, and the class."""
    pixels = torch.frombuffer(bytearray(sample["jpg"][:64]), dtype=torch.uint8)
    return {"image": pixels / 255, "label": int(sample["cls"])}


def main() -> None:
    """Train on what the command line names, as far as it goes."""
    dataset = wds.WebDataset(sys.argv[1], shardshuffle=False, nodesplitter=wds.split_by_node).map(decode)
    loader = wds.WebLoader(dataset.batched(BATCH, collation_fn=default_collate), batch_size=None, num_workers=2)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy=DDPStrategy(timeout=timedelta(seconds=20)),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(), loader)


if __name__ == "__main__":
    main()
