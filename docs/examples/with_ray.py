"""Ray Train: two workers, and resuming from a reported checkpoint.

python with_ray.py s3://bucket/train/ --storage $PWD --name first
python with_ray.py s3://bucket/train/ --storage $PWD --name second \\
    --resume $(ls $PWD/first/checkpoint_*/state.pt | tail -n 1)

The second run may have another number of `--workers`. `shardcache status` shows the job by the name of the run.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from torch import nn

from shardcache_client.dataset import ShardDataset

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


def train(config: dict[str, Any]) -> None:
    """Train on one worker's share."""
    dataset = ShardDataset(
        config["urls"], shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=config["socket"]
    )
    loader = dataset.loader(num_workers=1)
    plain = nn.Linear(64, 10)  # its state has the same names on any number of workers; DDP's has others
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
            nn.functional.cross_entropy(net(batch["image"]), batch["label"]).backward()
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
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--storage", "--name", "--resume", "--workers"):
        parser.add_argument(option)
    args = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=int(args.workers or 2), use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name=args.name, storage_path=args.storage),
    )
    print(trainer.fit().checkpoint)


if __name__ == "__main__":
    main()
