"""A training job with a step of a fixed length, in a process of its own; prints how long it waited, as JSON.

python -m benchmarks.reading.training '{"contender": "shardcache", "source": "s3://…/train-{0000..0029}.tar", …}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

BATCH_SAMPLES = 32
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a training job."""

    contender: str  # key of `CONTENDERS`
    source: str  # brace pattern of the shards: s3 urls for ours, http urls or local paths for webdataset
    samples: int  # what one epoch must give
    sample_bytes: int  # payload of each
    samples_per_s: float  # how fast the accelerator would be
    epochs: int = 1  # how many, with the same workers
    seed: int = 7  # of the shuffling
    window: int = 0  # how many shards ours mixes; 0 to read each as it was written, as webdataset does
    job: str = "training"  # name of the job
    socket: str = ""  # of the daemon, where the contender is ours
    cache_dir: str = ""  # of webdataset's own cache, or empty for none
    start_after_s: float = 0.0  # pause before the first epoch
    reads: str = ""  # file to which each start of a shard is appended, or empty for none; see `Logged`

    def to_json(self) -> str:
        """Return the command-line argument."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Course:
    """Outcome of the epochs.

    Attributes:
        wall_s: from `iter(loader)` to the end of the iteration, workers' start included; summed over the epochs.
    """

    wall_s: float = 0.0
    waited_s: float = 0.0  # the part of it in which no step ran
    first_batch_s: float = 0.0  # from the first `iter(loader)` to the first batch

    @property
    def waiting_percent(self) -> float:
        """Share of the wall time in which the accelerator would have had nothing to do."""
        return 1e2 * self.waited_s / self.wall_s

    def __str__(self) -> str:
        return (
            f"waited {self.waiting_percent:.1f} % of {self.wall_s:.1f} s, first batch after {self.first_batch_s:.2f} s"
        )


class Logged(IterableDataset[Any]):
    """Appends a line to a file for each shard whose first sample is yielded: seconds, reader and url, with blanks."""

    def __init__(self, dataset: Iterable[Any], job: str, path: Path) -> None:
        self._dataset = dataset
        self._job = job
        self._path = path

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        reader = f"{self._job}/{info.id if info else 0}"
        seen: set[str] = set()
        # Lines of several processes stay whole: each is one short write to the end of the file.
        with self._path.open("ab", buffering=0) as log:
            for sample in self._dataset:
                if (url := sample["__url__"]) not in seen:
                    seen.add(url)
                    log.write(f"{time.monotonic():.6f} {reader} {url}\n".encode())
                yield sample


class FromMemory(IterableDataset[Any]):
    """Samples that cost nothing to read: what is waited for them is the loader's own."""

    def __init__(self, samples: int, sample_bytes: int) -> None:
        self._samples = samples
        self._zeros = bytearray(sample_bytes)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self._samples, step):
            # A copy each: pickle sends an object that it has met before as a mere reference.
            yield {"__key__": f"{number:010d}", "__url__": "", "jpg": bytes(self._zeros)}


def memory(task: Task) -> tuple[IterableDataset[Any], Callable[[int], None]]:
    """No reading at all."""
    return FromMemory(task.samples, task.sample_bytes), lambda _epoch: None


def shardcache(task: Task) -> tuple[IterableDataset[Any], Callable[[int], None]]:
    """Our dataset, shuffled."""
    from shardcache_client import ShardDataset

    dataset = ShardDataset(
        task.source,
        shuffle=True,
        shuffle_window=task.window,
        seed=task.seed,
        epochs=task.epochs,
        batch_size=BATCH_SAMPLES,
        job=task.job,
        socket=task.socket,
    )
    return dataset, dataset.set_epoch


def webdataset(task: Task) -> tuple[IterableDataset[Any], Callable[[int], None]]:
    """webdataset with its shards shuffled; an http url goes through `curl -s`."""
    from webdataset import WebDataset

    dataset = WebDataset(task.source, shardshuffle=1000, seed=task.seed, cache_dir=task.cache_dir or None)
    return dataset, lambda _epoch: None


CONTENDERS = {contender.__name__: contender for contender in (shardcache, webdataset, memory)}


def train(task: Task) -> Course:
    """Run the epochs. Raises RuntimeError where one gives another number of samples than the dataset has."""
    dataset, set_epoch = CONTENDERS[task.contender](task)
    source = Logged(dataset, task.job, Path(task.reads)) if task.reads else dataset
    loader = DataLoader(source, batch_size=BATCH_SAMPLES, collate_fn=list, num_workers=WORKERS, persistent_workers=True)
    time.sleep(task.start_after_s)
    course = Course()
    for epoch in range(task.epochs):
        set_epoch(epoch)
        course = _epoch(loader, task, course)
    return course


def _epoch(loader: DataLoader[Any], task: Task, before: Course) -> Course:
    """Read one epoch: each step lasts as long as its samples take, and everything else is waiting."""
    samples, waited_s = 0, 0.0
    started_s = asked_s = time.perf_counter()
    first_batch_s = before.first_batch_s
    for batch in loader:
        waited_s += time.perf_counter() - asked_s
        first_batch_s = first_batch_s or waited_s
        samples += len(batch)
        time.sleep(len(batch) / task.samples_per_s)
        asked_s = time.perf_counter()
    ended_s = time.perf_counter()
    if samples != task.samples:
        raise RuntimeError(f"{task.contender} gave {samples} samples, the dataset has {task.samples}")
    return replace(
        before,
        wall_s=before.wall_s + ended_s - started_s,
        waited_s=before.waited_s + waited_s + ended_s - asked_s,
        first_batch_s=first_batch_s,
    )


def main() -> None:
    """Do what the argument says."""
    course = train(Task(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(course)))


if __name__ == "__main__":
    main()
