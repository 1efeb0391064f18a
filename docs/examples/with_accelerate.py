"""Hugging Face Accelerate: training, evaluation, and resuming from `accelerator.save_state`.

accelerate launch --num_processes 2 with_accelerate.py s3://bucket/train/ --validation s3://bucket/val/ --checkpoints .
accelerate launch --num_processes 2 with_accelerate.py s3://bucket/train/ --validation s3://bucket/val/ --resume step-12

Each process has its own share of the samples; `accelerator.prepare` returns a ShardLoader as it is, and would shard a
DataLoader a second time.
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from shardcache_client.dataset import ShardDataset
from shardcache_client.loading.loader import ShardLoader

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
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--validation", "--checkpoints", "--resume"):
        parser.add_argument(option)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    common: dict[str, Any] = {"batch_size": BATCH, "decode": decode, "socket": args.socket}
    training = ShardDataset(args.urls, shuffle=True, seed=7, **common)
    loader = training.loader(num_workers=2)
    validation = ShardDataset(args.validation, **common).loader(num_workers=1)
    net = nn.Linear(64, 10)
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
            accelerator.backward(nn.functional.cross_entropy(net(batch["image"]), batch["label"]))
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
