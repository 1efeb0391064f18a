"""One rank for `test_hugging_face`: a Trainer that makes its own loaders, or a ShardTrainer with and without a mesh.

    torchrun --nproc-per-node 2 trainer_job.py SOCKET INDEX OUT_FOLDER own
    torchrun --nproc-per-node 4 trainer_job.py SOCKET INDEX OUT_FOLDER (divided | whole)

Writes the errors of `train`, `evaluate` and `predict` as a JSON object, or the numbers of the samples of each batch.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments

from shardcache.errors import ConfigError
from shardcache_client import ShardDataset
from shardcache_client.transformers import ShardTrainer

OPTIONS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}


class Net(nn.Module):
    """A model of one number, which notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def forward(self, number: Tensor) -> dict[str, Tensor]:
        """Return a loss and the logits."""
        self.batches.append([int(each) for each in number])
        logits = self.net(number.float().unsqueeze(-1))
        return {"loss": logits.mean(), "logits": logits}


def decode(sample: dict[str, Any]) -> dict[str, Tensor]:
    """Return the sample's number."""
    return {"number": torch.tensor(int(sample["__key__"]))}


def refused(socket: str, index: str, out: str) -> None:
    """Call each of Trainer's loops; write the text of its ConfigError."""
    dataset = ShardDataset(index, socket=socket, batch_size=8, decode=decode)
    arguments = TrainingArguments(output_dir=out, max_steps=1, **OPTIONS)
    trainer = Trainer(Net(), arguments, train_dataset=dataset, eval_dataset=dataset)
    errors: dict[str, str | None] = {}
    for name, loop in {"train": trainer.train, "evaluate": trainer.evaluate, "predict": trainer.predict}.items():
        errors[name] = None
        try:
            loop(*([dataset] if name == "predict" else []))
        except ConfigError as exn:
            errors[name] = str(exn)
    (Path(out) / f"{arguments.process_index}.json").write_text(json.dumps(errors))


def resumed(socket: str, index: str, out: str, how: str) -> None:
    """Train steps of eight samples over a mesh, saving the fourth; or go on from there with every rank for itself."""
    size, names = ((2, 2), ("dp", "tp")) if how == "divided" else ((4,), ("dp",))
    steps = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 8 // size[0]}
    arguments = TrainingArguments(output_dir=f"{out}/saved", **OPTIONS, **steps)
    assert arguments.device.type == "cpu"  # initialises torch.distributed
    mesh = init_device_mesh("cpu", size, mesh_dim_names=names)["dp"]
    dataset = ShardDataset(index, shuffle=True, seed=7, socket=socket, decode=decode, mesh=mesh)
    net = Net()
    trainer = ShardTrainer(net, arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=f"{out}/saved/checkpoint-4" if how == "whole" else None)
    (Path(out) / f"{how}-{dist.get_rank()}.json").write_text(json.dumps(net.batches))
    dist.barrier()


if __name__ == "__main__":
    *places, mode = sys.argv[1:]
    if mode == "own":
        refused(*places)
    else:
        resumed(*places, mode)
