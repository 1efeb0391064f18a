"""NVIDIA DALI: an external source of encoded images, which DALI decodes in its own threads or on the GPU.

python with_dali.py s3://bucket/train.json --checkpoints .
python with_dali.py s3://bucket/train.json --resume step-9.json

RANK and WORLD_SIZE say which of several processes this is; torchrun and `srun` tell, too. Without `--device`, the
pipeline runs on the CPU.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def

from shardcache_client.reader import ShardReader

BATCH = 4
EPOCHS = 3


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
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--checkpoints", "--resume", "--device"):
        parser.add_argument(option)
    args = parser.parse_args()
    reader = ShardReader(args.urls, shuffle=True, seed=7, batch_size=BATCH, decode=encoded, socket=args.socket)
    if args.resume:
        reader.load_state_dict(json.loads(Path(args.resume).read_text()))
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
            if args.checkpoints and reader.topology().rank == 0:  # its state speaks for all
                Path(args.checkpoints, f"step-{step}.json").write_text(state)
        report(f"epoch {epoch}", shown, args.out)


if __name__ == "__main__":
    main()
