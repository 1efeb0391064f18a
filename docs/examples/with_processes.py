"""Decoding in several processes without torch: each has its own reader, and the training process takes batches in turn.

RANK=0 WORLD_SIZE=2 python with_processes.py 's3://bucket/index.json' --checkpoints DIR
RANK=0 WORLD_SIZE=2 python with_processes.py 's3://bucket/index.json' --resume DIR/step-9

For JAX, RANK and WORLD_SIZE are jax.process_index() and jax.process_count().
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from toy_numpy import BATCH, EPOCHS, arguments, batches, decode, report

from shardcache_client import ShardReader

PROCESSES = 2  # readers per training process


def read(urls: str, socket: str | None, rank: int, world_size: int, resumed: dict[str, Any], out: Connection) -> None:
    """Send the batches of one reader, and None after each epoch."""
    reader = ShardReader(
        urls, shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=socket, rank=rank, world_size=world_size
    )
    if resumed["states"]:
        reader.load_state_dict(resumed["states"])  # each finds its own among those of its training process
    for epoch in range(resumed["epoch"], EPOCHS):
        reader.set_epoch(epoch)
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
        spawn.Process(target=read, args=(args.urls, args.socket, *place, resumed, out), daemon=True).start()
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
    args = arguments("--checkpoints", "--resume")
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
