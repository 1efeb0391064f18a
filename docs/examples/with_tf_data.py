"""tf.data under MultiWorkerMirroredStrategy: each worker reads its share.

TF_CONFIG=… python with_tf_data.py 's3://bucket/index.json' --checkpoints DIR
TF_CONFIG=… python with_tf_data.py 's3://bucket/index.json' --resume DIR/step-9.json

`model.fit` and `experimental_distribute_dataset` shard the batches a second time, without an error: turn that off with
`tf.data.experimental.AutoShardPolicy.OFF`. `distribute_datasets_from_function` leaves them as they are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from toy_numpy import BATCH, EPOCHS, PIXELS, arguments, batches, decode, load, report, save

from shardcache_client import ShardReader

BATCH_SPEC = {
    "key": tf.TensorSpec([None], tf.string),
    "image": tf.TensorSpec([None, PIXELS], tf.float32),
    "label": tf.TensorSpec([None], tf.int64),
    "state": tf.TensorSpec([], tf.string),
}


def main() -> None:
    """Train on what the command line names."""
    args = arguments("--checkpoints", "--resume")
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
    load(reader, args.resume)
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
            if workers.task_id == 0:  # its state speaks for all
                save(state.decode(), args.checkpoints, step)
        report(f"epoch {epoch}", shown, args.out)


if __name__ == "__main__":
    main()
