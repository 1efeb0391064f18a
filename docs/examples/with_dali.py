"""NVIDIA DALI: an external source of encoded images, which DALI decodes in its own threads or on the GPU.

RANK=0 WORLD_SIZE=2 python with_dali.py 's3://bucket/index.json' --checkpoints DIR
RANK=0 WORLD_SIZE=2 python with_dali.py 's3://bucket/index.json' --resume DIR/step-9.json

torchrun sets RANK and WORLD_SIZE, and `srun` variables of its own. Without `--device`, the pipeline runs on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def
from toy_numpy import BATCH, EPOCHS, arguments, batches, load, report, save

from shardcache_client import ShardReader


def encoded(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what DALI takes: arrays of bytes and numbers."""
    return {
        "key": np.frombuffer(sample["__key__"].encode(), np.uint8),
        "jpg": np.frombuffer(sample["jpg"], np.uint8),
        "label": np.array([int(sample["cls"])]),
    }


class Batches:
    """The batches of an epoch for each iteration, and the states after those that DALI has taken ahead."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader = reader
        self.states: deque[str] = deque()

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(self.reader):
            self.states.append(batch["state"])
            yield batch["key"], batch["jpg"], batch["label"]


@pipeline_def(batch_size=BATCH, num_threads=2)
def images(source: Batches, *, on_gpu: bool) -> Any:
    """Decode and resize."""
    keys, jpegs, labels = fn.external_source(source, num_outputs=3, cycle="raise")
    pixels = fn.decoders.image(jpegs, device="mixed" if on_gpu else "cpu")
    return keys, fn.resize(pixels, size=(8, 8)), labels


def main() -> None:
    """Read what the command line names."""
    args = arguments("--checkpoints", "--resume", "--device")
    reader = ShardReader(args.urls, shuffle=True, seed=7, batch_size=BATCH, decode=encoded, socket=args.socket)
    load(reader, args.resume)
    source, device = Batches(reader), None if args.device is None else int(args.device)
    pipeline = images(source, on_gpu=device is not None, device_id=device)
    pipeline.build()
    step = 0
    for epoch in range(reader.epoch, EPOCHS):  # each iteration of the source reads the next epoch
        shown = []
        while True:
            try:
                keys, _pixels, _labels = pipeline.run()
            except StopIteration:
                pipeline.reset()
                break
            shown.append([bytes(np.array(key)).decode() for key in keys])
            step += 1
            state = source.states.popleft()
            if reader.topology().rank == 0:  # its state speaks for all
                save(state, args.checkpoints, step)
        report(f"epoch {epoch}", shown, args.out)


if __name__ == "__main__":
    main()
