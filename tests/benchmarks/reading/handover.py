"""From DataLoader workers to the trainer: raw samples as bytes through the pipe, and as references with zero copy.

python -m benchmarks.reading.handover '{"contender": "webdataset", "source": "…", …}': one contender, a process.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.daemon import Daemon
from benchmarks.data import LARGE
from benchmarks.measure import interleaved, python, run
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace

WORKERS = 2
BATCH = 32
_TIMED_S = 3.0

ZERO_COPY = "zero_copy"
PEERS = {"webdataset": Target("≥", 5.0), "litdata": Target("≥", 5.0), "shardcache": None}
USES = {False: "left alone", True: "every byte read"}


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a contender."""

    contender: str  # key of `CONTENDERS`
    source: str  # url, or folder of tars or chunks
    extension: str  # the field that counts
    payload_bytes: int  # what one epoch must give of it
    read: bool  # have the trainer read every byte; else only ask for the length
    socket: str  # of the daemon, where the contender is ours


def measure(place: Workplace) -> list[Row]:
    """Return megabytes a second that reach the trainer, best of all rounds each."""
    with place.daemon() as daemon:
        daemon.warm(place.url(LARGE))
        return [row for read in USES for row in _measure_use(place, daemon, read)]


def _measure_use(place: Workplace, daemon: Daemon, read: bool) -> list[Row]:
    contenders = _contenders(place, daemon, read)
    tries = interleaved(contenders, lambda text: place.say(f"{USES[read]} · {text} MB/s"), place.rounds)
    best = {name: max(rates) for name, rates in tries.items()}
    what = f"MB/s, {LARGE.label} × {BATCH}, {WORKERS} workers, {USES[read]}"
    return [
        Row("handover", what, best[ZERO_COPY], f"{peer}, bytes", best[peer], target) for peer, target in PEERS.items()
    ]


def _contenders(place: Workplace, daemon: Daemon, read: bool) -> dict[str, Callable[[], float]]:
    dataset, url = place.dataset(LARGE), place.url(LARGE)
    sources = {
        ZERO_COPY: url,
        "shardcache": url,
        "webdataset": str(dataset.folder),
        "litdata": str(place.litdata(LARGE)),
    }

    def hand_over(contender: str) -> float:
        (extension,) = LARGE.extensions
        task = Task(contender, sources[contender], extension, dataset.payload_bytes, read, str(daemon.socket))
        output = run(python("reading.handover", json.dumps(asdict(task)))).output
        return round(float(output.splitlines()[-1]), 1)

    return {name: partial(hand_over, name) for name in sources}


def zero_copy(task: Task) -> Iterable[list[Any]]:
    """Our dataset, by reference."""
    from shardcache_client import ShardDataset

    return _loader(ShardDataset(task.source, socket=task.socket, zero_copy=True))


def shardcache(task: Task) -> Iterable[list[Any]]:
    """Our dataset, as bytes."""
    from shardcache_client import ShardDataset

    return _loader(ShardDataset(task.source, socket=task.socket))


def webdataset(task: Task) -> Iterable[list[Any]]:
    """webdataset over local tars."""
    from webdataset import WebDataset

    return _loader(WebDataset(sorted(map(str, Path(task.source).glob("*.tar"))), shardshuffle=False))


def litdata(task: Task) -> Iterable[list[Any]]:
    """litdata over its own chunks in a local folder, through its own loader."""
    logging.getLogger("litdata").setLevel(logging.ERROR)
    from litdata import StreamingDataLoader, StreamingDataset

    def as_bytes(sample: dict[str, Any]) -> dict[str, Any]:
        # Its samples hold memoryviews, which no queue can pickle: whoever does not decode in the workers does this.
        return sample | {task.extension: bytes(sample[task.extension])}

    return _loader(StreamingDataset(task.source, transform=as_bytes), StreamingDataLoader)


def _loader(dataset: Any, kind: Any = None) -> Iterable[list[Any]]:
    from torch.utils.data import DataLoader

    chosen = kind or DataLoader
    loader: Iterable[list[Any]] = chosen(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=list, persistent_workers=True
    )
    return loader


CONTENDERS = {contender.__name__: contender for contender in (zero_copy, shardcache, webdataset, litdata)}


def mb_per_s(task: Task) -> float:
    """Receive an epoch unmeasured and checked, with the workers' start in it, then whole epochs for a while."""
    batches = CONTENDERS[task.contender](task)
    if (received := _receive(batches, task)) != task.payload_bytes:
        raise RuntimeError(f"{task.contender} gave {received} bytes, the dataset has {task.payload_bytes}")
    received, started_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < _TIMED_S:
        received += _receive(batches, task)
    return received / elapsed_s / 1e6


def _receive(batches: Iterable[list[Any]], task: Task) -> int:
    import numpy as np

    received = 0
    for batch in batches:
        for sample in batch:
            value = sample[task.extension]
            received += len(value)
            if task.read:
                np.frombuffer(value, np.uint64).sum()
    return received


if __name__ == "__main__":
    print(mb_per_s(Task(**json.loads(sys.argv[1]))))
