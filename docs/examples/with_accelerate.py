"""Hugging Face Accelerate.

accelerate launch --num_processes 2 with_accelerate.py 's3://bucket/train-{000000..000999}.tar'  # or torchrun

`accelerator.prepare(loader)` would cut up every batch once more, not knowing that each process has samples of its own.
`prepare_data_loader`, told of a single process, moves batches to the device, lets gradient accumulation know the last
one, and cuts nothing.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from toy import BATCH, EPOCHS, arguments, decode, loss_of, model, report

from shardcache_client import ShardDataset


def main() -> None:
    """Train on what the command line names."""
    args = arguments()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    dataset = ShardDataset(args.urls, shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=args.socket)
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=BATCH, num_workers=2),
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
    )
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        shown = []
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            shown.append(batch["key"])
        report(f"epoch {epoch}", shown, args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
