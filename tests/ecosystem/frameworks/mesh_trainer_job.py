"""One rank of four for `test_hugging_face`: a ShardTrainer over a mesh, or resumed with every rank for itself.

    torchrun --nproc-per-node 4 mesh_trainer_job.py SOCKET INDEX OUT_FOLDER (divided | whole)

Writes the numbers of the samples of each batch that the model is given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments

from shardcache_client import ShardDataset
from shardcache_client.transformers import ShardTrainer


class Net(nn.Module):
    """A model of one number, which notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def forward(self, number: Tensor) -> dict[str, Tensor]:
        """Return a loss."""
        self.batches.append([int(each) for each in number])
        return {"loss": self.net(number.float().unsqueeze(-1)).mean()}


def decode(sample: dict[str, Any]) -> dict[str, Tensor]:
    """Return the sample's number."""
    return {"number": torch.tensor(int(sample["__key__"]))}


def main() -> None:
    """Train steps of eight samples, saving the fourth; or go on from there."""
    socket, index, out, how = sys.argv[1:]
    size, names = ((2, 2), ("dp", "tp")) if how == "divided" else ((4,), ("dp",))
    options = {"output_dir": f"{out}/saved", "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    steps = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 8 // size[0]}
    arguments = TrainingArguments(**options, **steps)
    assert arguments.device.type == "cpu"  # initialises torch.distributed
    mesh = init_device_mesh("cpu", size, mesh_dim_names=names)["dp"]
    dataset = ShardDataset(index, shuffle=True, seed=7, socket=socket, decode=decode, mesh=mesh)
    net = Net()
    trainer = ShardTrainer(net, arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=f"{out}/saved/checkpoint-4" if how == "whole" else None)
    (Path(out) / f"{how}-{dist.get_rank()}.json").write_text(json.dumps(net.batches))
    dist.barrier()


if __name__ == "__main__":
    main()
