"""tf.data under MultiWorkerMirroredStrategy: each worker reads its share.

export TF_CONFIG='{"cluster": {"worker": ["localhost:4321"]}, "task": {"type": "worker", "index": 0}}'
python with_tf_data.py s3://bucket/train.json --checkpoints .
python with_tf_data.py s3://bucket/train.json --resume step-9.json

`model.fit` and `experimental_distribute_dataset` shard the batches a second time, without an error: turn that off with
`tf.data.experimental.AutoShardPolicy.OFF`. `distribute_datasets_from_function` leaves them as they are.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

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


BATCH_SPEC = {
    "key": tf.TensorSpec([None], tf.string),
    "image": tf.TensorSpec([None, PIXELS], tf.float32),
    "label": tf.TensorSpec([None], tf.int64),
    "state": tf.TensorSpec([], tf.string),
}


def main() -> None:
    """Train on what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--checkpoints", "--resume"):
        parser.add_argument(option)
    args = parser.parse_args()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    workers = strategy.cluster_resolver
    reader = ShardReader(
        args.urls,
        shuffle=True,
        seed=7,
        batch_size=BATCH,
        decode=decode,
        socket=args.socket,
        rank=workers.task_id,
        world_size=workers.cluster_spec().num_tasks("worker"),
    )
    if args.resume:
        reader.load_state_dict(json.loads(Path(args.resume).read_text()))
    dataset = tf.data.Dataset.from_generator(lambda: batches(reader), output_signature=BATCH_SPEC).prefetch(2)
    with strategy.scope():
        net = tf.Variable(tf.zeros((PIXELS, 10)))

    def train(batch: dict[str, Any]) -> None:
        with tf.GradientTape() as tape:
            scores = batch["image"] @ net
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], scores)
        gradient = tape.gradient(loss, net)
        total = tf.distribute.get_replica_context().all_reduce("sum", gradient)
        net.assign_sub(0.1 / BATCH / strategy.num_replicas_in_sync * total)

    step_of_all = tf.function(lambda batch: strategy.run(train, (batch,)), reduce_retracing=True)
    step = 0
    for epoch in range(reader.epoch, EPOCHS):
        reader.set_epoch(epoch)
        shown = []
        for batch in strategy.distribute_datasets_from_function(lambda _: dataset):
            step_of_all(batch)
            keys, state = (strategy.experimental_local_results(batch[name])[0].numpy() for name in ("key", "state"))
            shown.append([key.decode() for key in keys])
            step += 1
            if args.checkpoints and workers.task_id == 0:  # its state speaks for all
                Path(args.checkpoints, f"step-{step}.json").write_text(state.decode())
        report(f"epoch {epoch}", shown, args.out)


if __name__ == "__main__":
    main()
