"""JAX over several processes: each reads its share, and a batch of all processes is one sharded array.

python with_jax.py s3://bucket/train.json --coordinator localhost:4321 --processes 1 --process 0 --checkpoints .
python with_jax.py s3://bucket/train.json --coordinator localhost:4321 --processes 1 --process 0 --resume step-9.json

On TPUs and under Slurm, `jax.distributed.initialize()` finds the processes without arguments.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardcache_client.reader import ShardReader

BATCH = 4
EPOCHS = 3
PIXELS = 64


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the key, the first bytes of the image as if they were its pixels, and the class."""
    pixels = np.frombuffer(sample["jpg"][:64], np.uint8)
    return {"key": sample["__key__"], "image": pixels.astype(np.float32) / 255, "label": int(sample["cls"])}


def batches(reader: ShardReader) -> Iterator[dict[str, Any]]:
    """Yield the batches of an epoch, each with the state after it: frameworks take batches ahead of the training."""
    samples = iter(reader)
    while batch := list(islice(samples, BATCH)):
        fields = {name: [sample[name] for sample in batch] for name in batch[0]}
        yield fields | {"state": json.dumps(reader.state_dict())}


def report(name: str, batches: list[list[str]], out: str | None) -> None:
    """Print the number of this process's batches; add their keys to a file, if one is named."""
    print(f"{name}: {len(batches)} batches", flush=True)
    if out:
        with open(out, "a") as file:
            print(json.dumps({"name": name, "rank": 0, "batches": batches}), file=file)


def loss_of(net: jax.Array, image: jax.Array, label: jax.Array) -> jax.Array:
    """Return how wrong the model is about a batch."""
    scores = jax.nn.log_softmax(image @ net)
    return -jnp.mean(jnp.take_along_axis(scores, label[:, None], axis=1))


@jax.jit
def train(net: jax.Array, image: jax.Array, label: jax.Array) -> jax.Array:
    """Return the model after a step; jit averages over the batches of all processes."""
    return net - 0.1 * jax.grad(loss_of)(net, image, label)


def main() -> None:
    """Train on what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--coordinator", "--processes", "--process", "--checkpoints", "--resume"):
        parser.add_argument(option)
    args = parser.parse_args()
    jax.distributed.initialize(args.coordinator, int(args.processes), int(args.process))
    reader = ShardReader(
        args.urls,
        shuffle=True,
        seed=7,
        batch_size=BATCH,
        decode=decode,
        socket=args.socket,
        rank=jax.process_index(),
        world_size=jax.process_count(),
    )
    if args.resume:
        reader.load_state_dict(json.loads(Path(args.resume).read_text()))
    mesh = Mesh(np.array(jax.devices()), "data")
    net = jax.device_put(np.zeros((PIXELS, 10), np.float32), NamedSharding(mesh, PartitionSpec()))
    by_sample = NamedSharding(mesh, PartitionSpec("data"))
    step = 0
    for epoch in range(reader.epoch, EPOCHS):
        reader.set_epoch(epoch)
        shown = []
        # The last batch may be short, on all processes alike. Several devices per process cannot share it evenly: drop
        # it, or give the reader a samples_per_epoch that is a multiple of BATCH * jax.process_count().
        for batch in batches(reader):
            image = jax.make_array_from_process_local_data(by_sample, np.stack(batch["image"]))
            label = jax.make_array_from_process_local_data(by_sample, np.array(batch["label"]))
            net = train(net, image, label)
            shown.append(batch["key"])
            step += 1
            if args.checkpoints and jax.process_index() == 0:  # its state speaks for all
                Path(args.checkpoints, f"step-{step}.json").write_text(batch["state"])
        report(f"epoch {epoch}", shown, args.out)


if __name__ == "__main__":
    main()
