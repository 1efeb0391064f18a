"""The fault that `with_lightning.py` avoids: the same training by webdataset alone, over shards of uneven sizes.

python counterexample.py '/data/train-{000000..000006}.tar'

Each rank opens shards of its own, and so takes as many steps as their samples happen to allow. The rank that is through
first goes on to what comes after an epoch, while the other one waits for its gradients: until the time-out, which is
half an hour in practice and twenty seconds here.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import webdataset as wds
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import default_collate
from toy import BATCH, EPOCHS, arguments, decode
from with_lightning import Toy


def main() -> None:
    """Train on what the command line names, as far as it goes."""
    args = arguments()
    dataset = wds.WebDataset(args.urls, shardshuffle=False, nodesplitter=wds.split_by_node).map(decode)
    loader = wds.WebLoader(dataset.batched(BATCH, collation_fn=default_collate), batch_size=None, num_workers=2)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy=DDPStrategy(timeout=timedelta(seconds=20)),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(args.out), loader)


if __name__ == "__main__":
    main()
