"""JAX over several processes: each reads its share, and a batch of all processes is one sharded array.

python with_jax.py 's3://bucket/index.json' --coordinator HOST:PORT --processes 2 --process 0 --checkpoints DIR
python with_jax.py 's3://bucket/index.json' --coordinator HOST:PORT --processes 2 --process 0 --resume DIR/step-9.json

On TPUs and under Slurm, `jax.distributed.initialize()` finds the processes without arguments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy_numpy import BATCH, EPOCHS, PIXELS, arguments, batches, decode, load, report, save

from shardcache_client import ShardReader


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
    args = arguments("--coordinator", "--processes", "--process", "--checkpoints", "--resume")
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
    load(reader, args.resume)
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
            if jax.process_index() == 0:  # its state speaks for all
                save(batch["state"], args.checkpoints, step)
        report(f"epoch {epoch}", shown, args.out)


if __name__ == "__main__":
    main()
