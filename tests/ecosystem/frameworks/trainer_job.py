"""One rank of two, for `test_hugging_face`: a Trainer that makes its own loaders, over ShardDatasets.

    torchrun --nproc-per-node 2 trainer_job.py SOCKET INDEX OUT_FOLDER

Writes the errors of `train`, `evaluate` and `predict` as a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from shardcache.errors import ConfigError
from shardcache_client import ShardDataset


class Net(nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, number: Tensor) -> dict[str, Tensor]:
        """Return a loss and the logits."""
        logits = self.net(number.float().unsqueeze(-1))
        return {"loss": logits.mean(), "logits": logits}


def decode(sample: dict[str, Any]) -> dict[str, Tensor]:
    """Return the sample's number."""
    return {"number": torch.tensor(int(sample["__key__"]))}


def main() -> None:
    """Call each of Trainer's loops."""
    socket, index, out = sys.argv[1:]
    dataset = ShardDataset(index, socket=socket, batch_size=8, decode=decode)
    arguments = TrainingArguments(output_dir=out, use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True)
    trainer = Trainer(Net(), arguments, train_dataset=dataset, eval_dataset=dataset)
    errors = {}
    for name, loop in {"train": trainer.train, "evaluate": trainer.evaluate}.items():
        errors[name] = error_of(loop)
    errors["predict"] = error_of(trainer.predict, dataset)
    (Path(out) / f"{arguments.process_index}.json").write_text(json.dumps(errors))


def error_of(loop: Any, *arguments: Any) -> str | None:
    """Return the text of the ConfigError, if there is one."""
    try:
        loop(*arguments)
    except ConfigError as exn:
        return str(exn)
    return None


if __name__ == "__main__":
    main()
