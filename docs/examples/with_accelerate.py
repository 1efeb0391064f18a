"""Hugging Face Accelerate: training, evaluation, and resuming from `accelerator.save_state`.

accelerate launch --num_processes 2 with_accelerate.py URLS --validation URLS --checkpoints DIR  # or torchrun
accelerate launch --num_processes 2 with_accelerate.py URLS --validation URLS --resume DIR/step-12

Each process has its own share of the samples; `accelerator.prepare` returns a ShardLoader as it is, and would shard a
DataLoader a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from toy import BATCH, EPOCHS, arguments, decode, loss_of, model, report

from shardcache_client import ShardDataset, ShardLoader


class Progress:
    """Epoch and step of the training loop, saved with Accelerate's checkpoints."""

    epoch = 0
    step = 0

    def state_dict(self) -> dict[str, int]:
        """Return both."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set both."""
        self.epoch, self.step = state["epoch"], state["step"]


def main() -> None:
    """Train on the shards that the command line names."""
    args = arguments("--validation", "--checkpoints", "--resume")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    common: dict[str, Any] = {"batch_size": BATCH, "decode": decode, "socket": args.socket}
    training = ShardDataset(args.urls, shuffle=True, seed=7, **common)
    loader = training.loader(num_workers=2)
    validation = ShardDataset(args.validation, **common).loader(num_workers=1)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    progress = Progress()
    accelerator.register_for_checkpointing(loader, progress)  # rank 0's, which speak for all
    if args.resume:
        accelerator.load_state(args.resume)
    for epoch in range(progress.epoch, EPOCHS):
        progress.epoch = epoch
        loader.set_epoch(epoch)
        shown = []
        for batch in loader:
            batch = send_to_device(batch, accelerator.device)
            optimizer.zero_grad()
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            progress.step += 1
            if args.checkpoints and progress.step % 3 == 0:
                accelerator.save_state(f"{args.checkpoints}/step-{progress.step}")
            shown.append(batch["key"])
        report(f"epoch {epoch} training", shown, args.out)
        shown = evaluate(accelerator, net, validation)
        report(f"epoch {epoch} validation", shown, args.out)
    accelerator.end_training()


@torch.inference_mode()
def evaluate(accelerator: Accelerator, net: nn.Module, loader: ShardLoader) -> list[list[str]]:
    """Print the accuracy over all ranks; return the keys of this rank's batches."""
    shown, guessed = [], []
    for batch in loader:
        batch = send_to_device(batch, accelerator.device)
        right = net(batch["image"]).argmax(1) == batch["label"]
        guessed.append(accelerator.gather_for_metrics(right))
        shown.append(batch["key"])
    accelerator.print(f"accuracy {torch.cat(guessed).float().mean():.2f} of {len(torch.cat(guessed))} samples")
    return shown


if __name__ == "__main__":
    main()
