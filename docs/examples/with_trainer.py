"""Hugging Face Trainer: training, evaluation, prediction, and resuming from a checkpoint.

torchrun --standalone --nproc-per-node 2 with_trainer.py s3://bucket/train/ --validation s3://bucket/val/ \\
    --checkpoints saved
torchrun --standalone --nproc-per-node 1 with_trainer.py s3://bucket/train/ --validation s3://bucket/val/ \\
    --checkpoints saved --resume saved/checkpoint-6

A step of the optimizer has the same number of samples on any number of processes, so that a run may continue on
another number of them.
"""

import argparse
import gc
import json
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardcache_client.dataset import ShardDataset
from shardcache_client.transformers import ShardTrainer

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


STEP = 2 * BATCH  # samples


class Toy(nn.Module):
    """The toy model, with the loss that Trainer wants of it, and the samples it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.shown: dict[bool, list[list[str]]] = {True: [], False: []}

    def forward(self, key: list[str], image: Tensor, label: Tensor, number: Tensor) -> dict[str, Tensor]:
        """Return loss and logits of a batch."""
        self.shown[self.training].append(key)
        logits = self.net(image)
        return {"loss": nn.functional.cross_entropy(logits, label), "logits": logits}

    def tell(self, name: str, out: str | None, *, training: bool) -> None:
        """Report the samples shown since the last time."""
        report(name, self.shown[training], out)
        self.shown[training].clear()


class Report(TrainerCallback):  # type: ignore[misc]
    """Reports each epoch's samples."""

    def __init__(self, net: Toy, out: str | None) -> None:
        self.net = net
        self.out = out

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the training samples."""
        self.net.tell(f"epoch {math.ceil(state.epoch) - 1} training", self.out, training=True)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the samples of the evaluation."""
        self.net.tell(f"epoch {math.ceil(state.epoch) - 1} validation", self.out, training=False)


def numbered(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode a sample, with a number by which `predict`'s results are assigned: ranks' samples come interleaved."""
    return decode(sample) | {"number": int(sample["__key__"])}


def main() -> None:
    """Train on the shards that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--validation", "--checkpoints", "--resume"):
        parser.add_argument(option)
    args = parser.parse_args()
    common: dict[str, Any] = {"batch_size": BATCH, "decode": numbered, "socket": args.socket}
    training = ShardDataset(args.urls, shuffle=True, seed=7, **common)
    validation = ShardDataset(args.validation, **common)
    net = Toy()
    trainer = ShardTrainer(
        model=net,
        args=TrainingArguments(
            output_dir=args.checkpoints,
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            gradient_accumulation_steps=STEP // BATCH // int(os.environ.get("WORLD_SIZE", "1")),
            dataloader_num_workers=2,
            label_names=["label", "number"],
            eval_strategy="epoch",
            save_strategy="steps",
            save_steps=3,
            report_to="none",
            disable_tqdm=True,
        ),
        data_collator=default_collate,
        train_dataset=training,
        eval_dataset=validation,
        callbacks=[Report(net, args.out)],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    _, labels = trainer.predict(validation)[:2]
    report("predicted", [[f"{number:06d}" for number in labels[1]]], args.out)
    del trainer  # DDP has to go first: gloo may deadlock where DDP's end is what ends the process group
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
