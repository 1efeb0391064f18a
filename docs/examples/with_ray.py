"""Ray Train: two workers, and resuming from a reported checkpoint.

python with_ray.py 's3://bucket/train-{000000..000999}.tar' --storage /shared/runs --name first
python with_ray.py 's3://bucket/train-{000000..000999}.tar' --storage /shared/runs --name second \\
    --resume /shared/runs/first/CHECKPOINT/state.pt

The second run may have another number of `--workers`. `shardcache status` shows the job by the name of the run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from toy import BATCH, EPOCHS, arguments, decode, loss_of, model, report

from shardcache_client import ShardDataset


def train(config: dict[str, Any]) -> None:
    """Train on one worker's share."""
    dataset = ShardDataset(
        config["urls"], shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=config["socket"]
    )
    loader = dataset.loader(num_workers=1)
    plain = model()  # its state has the same names on any number of workers; DDP's has others
    net = ray.train.torch.prepare_model(plain)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first = 0
    if config["resume"]:
        state = torch.load(config["resume"], weights_only=True)
        plain.load_state_dict(state["net"])
        loader.load_state_dict(state["loader"])
        first = state["epoch"]
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        shown = []
        for step, batch in enumerate(loader):
            batch |= {name: batch[name].to(ray.train.torch.get_device()) for name in ("image", "label")}
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            shown.append(batch["key"])
            if step % 20 == 2:  # Ray takes seconds for a report
                save({"epoch": epoch, "net": plain.state_dict(), "loader": loader.state_dict()})
        report(f"epoch {epoch}", shown, config["out"])


def save(state: dict[str, Any]) -> None:
    """Report a checkpoint: rank 0's state speaks for all."""
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report({"epoch": state["epoch"]})
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"epoch": state["epoch"]}, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    """Train on the shards that the command line names."""
    args = arguments("--storage", "--name", "--resume", "--workers")
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=int(args.workers or 2), use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name=args.name, storage_path=args.storage),
    )
    print(trainer.fit().checkpoint)


if __name__ == "__main__":
    main()
