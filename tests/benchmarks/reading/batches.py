"""Batches gathered in DataLoader workers: as bytes and with zero copy, next to litdata.

Only the size of a batch reaches the trainer. So this measures reading; `handover` measures the pipe.

python -m benchmarks.reading.batches '{"contender": "litdata", "source": "…", …}': one contender, a process.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.daemon import Daemon
from benchmarks.data import LARGE
from benchmarks.measure import medians, python, run
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace

WORKERS = 2
BATCH = 32
_TIMED_S = 3.0

BYTES, ZERO_COPY, LITDATA = "shardcache", "zero_copy", "litdata"
_TARGETS = {BYTES: Target("≥", 0.9), ZERO_COPY: Target("≥", 1.1)}
_FORMS = {BYTES: "bytes", ZERO_COPY: "zero copy"}


@dataclass(frozen=True, slots=True)
class Task:
    """One contender's input and what it must give."""

    contender: str  # key of `CONTENDERS`
    source: str  # url, or folder of chunks
    extension: str  # the field that counts
    payload_bytes: int  # what one epoch must give of it
    socket: str  # of the daemon, where the contender is ours


@dataclass(frozen=True, slots=True)
class Gathered:
    """Size of a batch, all that its worker sends."""

    samples: int
    payload_bytes: int


def measure(place: Workplace) -> list[Row]:
    """Return samples a second that workers gather, medians of interleaved rounds."""
    with place.daemon() as daemon:
        daemon.warm(place.url(LARGE))
        rates = medians(_contenders(place, daemon), lambda text: place.say(f"{text} samples/s"), place.rounds)
    what = f"samples/s, {LARGE.label} × {BATCH}, {WORKERS} workers"
    return [
        Row("batches", f"{what}, {form}", rates[ours], LITDATA, rates[LITDATA], _TARGETS[ours])
        for ours, form in _FORMS.items()
    ]


def _contenders(place: Workplace, daemon: Daemon) -> dict[str, Callable[[], float]]:
    dataset, url = place.dataset(LARGE), place.url(LARGE)
    sources = {BYTES: url, ZERO_COPY: url, LITDATA: str(place.litdata(LARGE))}

    def gather(contender: str) -> float:
        (extension,) = LARGE.extensions
        task = Task(contender, sources[contender], extension, dataset.payload_bytes, str(daemon.socket))
        return round(float(run(python("reading.batches", json.dumps(asdict(task)))).output.splitlines()[-1]))

    return {name: partial(gather, name) for name in sources}


def shardcache(task: Task) -> Any:
    """Our dataset, as bytes."""
    from shardcache_client import ShardDataset

    return ShardDataset(task.source, socket=task.socket)


def zero_copy(task: Task) -> Any:
    """Our dataset, as views of its files."""
    from shardcache_client import ShardDataset

    return ShardDataset(task.source, socket=task.socket, zero_copy=True)


def litdata(task: Task) -> Any:
    """litdata over its own chunks in a local folder; its samples are views of them."""
    logging.getLogger("litdata").setLevel(logging.ERROR)
    from litdata import StreamingDataset

    return StreamingDataset(task.source)


CONTENDERS = {contender.__name__: contender for contender in (shardcache, zero_copy, litdata)}


def samples_per_s(task: Task) -> float:
    """Gather an epoch unmeasured, with the workers' start in it, then whole epochs for a while; check each."""
    from torch.utils.data import DataLoader

    # torch's own loader for all: litdata's dataset is no slower in it than in litdata's.
    loader: Iterable[Gathered] = DataLoader(
        CONTENDERS[task.contender](task),
        batch_size=BATCH,
        num_workers=WORKERS,
        collate_fn=partial(_gather, extension=task.extension),
        persistent_workers=True,
    )
    _read_epoch(loader, task)
    samples, started_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < _TIMED_S:
        samples += _read_epoch(loader, task)
    return samples / elapsed_s


def _gather(batch: list[Any], extension: str) -> Gathered:
    return Gathered(len(batch), sum(len(sample[extension]) for sample in batch))


def _read_epoch(loader: Iterable[Gathered], task: Task) -> int:
    samples, payload_bytes = 0, 0
    for gathered in loader:
        samples += gathered.samples
        payload_bytes += gathered.payload_bytes
    if payload_bytes != task.payload_bytes:
        raise RuntimeError(f"{task.contender} gave {payload_bytes} bytes, the dataset has {task.payload_bytes}")
    return samples


if __name__ == "__main__":
    print(samples_per_s(Task(**json.loads(sys.argv[1]))))
