"""A training job that saves its position, and continues when Slurm starts it again."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardcache_client import ShardDataset

BATCH = 10
EPOCHS = 2
CHECKPOINT = Path(os.environ.get("CHECKPOINT", "checkpoint.pt"))


def start() -> tuple[int, int]:
    """Join the job's ranks: those of torchrun, or the tasks of srun; return rank and world size."""
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    """Train, or continue from the checkpoint."""
    rank, ranks = start()
    torch.manual_seed(7)
    dataset = ShardDataset("shards/index.json", shuffle=True, seed=7, decode={"json": "json"})
    loader = dataset.loader(batch_size=BATCH, num_workers=1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    total = torch.zeros(1, dtype=torch.long)
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        total += saved["total"]
        loader.load_state_dict(saved["position"])
    stop_at = int(os.environ.get("STOP_AT", 0))
    step = 0
    while loader.epoch < EPOCHS:
        for batch in loader:
            numbers = batch["json"]["number"].float().unsqueeze(1)
            loss = (model(numbers / 1_000) - numbers / 500).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = batch["json"]["number"].sum()
            dist.all_reduce(seen)
            total += seen
            step += 1
            if rank == 0:
                position = loader.state_dict()
                draft = CHECKPOINT.with_suffix(".new")
                torch.save({"model": model.state_dict(), "total": total, "position": position}, draft)
                draft.replace(CHECKPOINT)
            if step == stop_at:
                time.sleep(1)
                raise SystemExit("preempted")
    if rank == 0:
        print(f"{ranks} ranks: the numbers of {EPOCHS} epochs add up to {int(total)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
