"""Decoding in several processes without torch: each has its own reader, and the training process takes batches in turn.

python with_processes.py s3://bucket/train.json --checkpoints .
python with_processes.py s3://bucket/train.json --resume step-9

RANK and WORLD_SIZE say which of several training processes this is; for JAX, they are jax.process_index() and
jax.process_count().
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from shardcache_client.reader import ShardReader

BATCH = 4
EPOCHS = 3


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


PROCESSES = 2  # readers per training process


def read(urls: str, socket: str | None, rank: int, world_size: int, epoch: int, state: Any, out: Connection) -> None:
    """Send the batches of one reader, which goes on from its state, and None after each epoch."""
    reader = ShardReader(
        urls, shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=socket, rank=rank, world_size=world_size
    )
    if state is not None:
        reader.load_state_dict(state)
    for each in range(epoch, EPOCHS):
        reader.set_epoch(each)
        for batch in batches(reader):
            out.send(batch)  # waits until there is room in the pipe: each reader is about a batch ahead
        out.send(None)


def start_readers(args: Any, rank: int, world_size: int, resumed: dict[str, Any]) -> list[Connection]:
    """Start the readers; if one fails, receiving from it raises EOFError."""
    spawn = multiprocessing.get_context("spawn")  # frameworks have threads, which do not survive a fork
    ends = []
    for number in range(PROCESSES):
        end, out = spawn.Pipe(duplex=False)
        place = rank * PROCESSES + number, world_size * PROCESSES
        state = resumed["states"].get(str(number))
        arguments = (args.urls, args.socket, *place, resumed["epoch"], state, out)
        spawn.Process(target=read, args=arguments, daemon=True).start()
        out.close()
        ends.append(end)
    return ends


def in_turn(readers: list[Connection], turn: int) -> Iterator[tuple[int, Any]]:
    """Yield the batches of an epoch, one from each reader in turn, with the number of the reader."""
    left = set(range(len(readers)))
    while left:
        if turn in left:
            batch = readers[turn].recv()
            if batch is None:
                left.remove(turn)
            else:
                yield turn, batch
        turn = (turn + 1) % len(readers)


def main() -> None:
    """Read what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out", "--checkpoints", "--resume"):
        parser.add_argument(option)
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    resumed: dict[str, Any] = {"epoch": 0, "turn": 0, "states": {}}
    if args.resume:
        resumed = json.loads(Path(f"{args.resume}-rank-{rank}.json").read_text())
    readers = start_readers(args, rank, world_size, resumed)
    step, turn, states = 0, resumed["turn"], resumed["states"]
    for epoch in range(resumed["epoch"], EPOCHS):
        shown = []
        for number, batch in in_turn(readers, turn):
            shown.append(batch["key"])
            step += 1
            states[str(number)] = json.loads(batch["state"])
            if args.checkpoints:
                checkpoint = {"epoch": epoch, "turn": (number + 1) % PROCESSES, "states": states}
                Path(args.checkpoints, f"step-{step}-rank-{rank}.json").write_text(json.dumps(checkpoint))
        turn = 0
        report(f"epoch {epoch}", shown, args.out)


if __name__ == "__main__":
    main()
