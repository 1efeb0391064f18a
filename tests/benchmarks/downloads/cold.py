"""A cold epoch from a distant store, with training steps of a fixed length, next to webdataset.

The clock runs from `iter(loader)` to the end of the iteration: for every contender the start of the
loader's workers counts, the import of its packages and the construction of its dataset do not. The
daemon's cache is empty, and no contender finds what it reads from local disk in memory. All shuffle
their shards and read the samples of each as they were written.

Whatever is read, the main process takes each batch out of a pipe, and its step does not run
meanwhile: the row next to samples from memory shows how much of the waiting is that.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.data import LARGE
from benchmarks.measure import Figure, Row, Target, call, interleaved, median_of
from benchmarks.workplace import Workplace, forget
from support.stores.throttled_s3 import ThrottledS3

BATCH_SAMPLES = 32
WORKERS = 2
SAMPLES_PER_S = 1000.0
OURS = "shardcache"
LOCAL = "webdataset, local disk"
STREAMED = "webdataset, streamed"
CACHED = "webdataset, its cache"
MEMORY = "samples from memory"


@dataclass(frozen=True, slots=True)
class Course:
    """Outcome of a training job.

    Attributes:
        wall_s: from `iter(loader)` to the end of the iteration, workers' start included; summed
            over the epochs.
    """

    wall_s: float = 0.0
    waited_s: float = 0.0  # the part of it in which no step ran
    first_batch_s: float = 0.0  # from the first `iter(loader)` to the first batch
    store_bytes: int = 0  # what the store sent for it

    @property
    def waiting_percent(self) -> float:
        """Share of the wall time in which the accelerator would have had nothing to do."""
        return 1e2 * self.waited_s / self.wall_s

    def __str__(self) -> str:
        waited = f"waited {self.waiting_percent:.1f} % of {self.wall_s:.1f} s"
        first = f"first batch after {self.first_batch_s:.2f} s"
        return f"{waited}, {first}, {self.store_bytes / 1e6:,.0f} MB from the store"


def measure(place: Workplace) -> list[Row]:
    """Return medians: waiting, seconds to the first batch, and bytes from the store."""
    contenders: dict[str, Callable[[], Course]] = {
        OURS: partial(_shardcache, place),
        LOCAL: partial(_local, place),
        STREAMED: partial(streamed, place),
        CACHED: partial(_cached, place),
        MEMORY: partial(_train, place, "memory", ""),
    }
    tries = interleaved(contenders, place.say, place.rounds)
    waiting = median_of(tries, "waiting_percent")
    first_s = median_of(tries, "first_batch_s")
    waits = f"of a cold epoch spent waiting, {WORKERS} workers"
    first = "to the first batch"
    store_mb = Figure(one.store_bytes / 1e6 for one in tries[OURS])
    return [
        Row("%", waits, waiting[OURS], LOCAL, waiting[LOCAL], Target("≤", 1.0)),
        *(
            Row("%", waits, waiting[OURS], peer, waiting[peer])
            for peer in (STREAMED, CACHED, MEMORY)
        ),
        Row("s", first, first_s[OURS], target=Target("≤", 0.5)),
        *(
            Row("s", first, first_s[OURS], peer, first_s[peer])
            for peer in (LOCAL, STREAMED, CACHED)
        ),
        Row(
            "MB",
            "from the store",
            store_mb,
            "the dataset",
            place.dataset(LARGE).tar_bytes / 1e6,
            Target("=", 1),
        ),
    ]


def _shardcache(place: Workplace) -> Course:
    dataset = place.dataset(LARGE)
    with place.far_store(dataset) as store, place.daemon(store=store) as daemon:
        url = f"s3://{dataset.folder.name}/{dataset.names}"
        return _sent(_train(place, "shardcache", url, socket=str(daemon.socket)), store)


def _local(place: Workplace) -> Course:
    dataset = place.dataset(LARGE)
    forget(dataset.shards)
    return _train(place, "webdataset", f"{dataset.folder}/{dataset.names}")


def streamed(place: Workplace, **how: Any) -> Course:
    """Train with webdataset, which reads through `pipe:curl`."""
    dataset = place.dataset(LARGE)
    with place.far_store(dataset) as store:
        return _sent(
            _train(place, "webdataset", store.http_url(dataset.folder.name, dataset.names), **how),
            store,
        )


def _cached(place: Workplace) -> Course:
    with place.folder() as cache_dir:
        return streamed(place, cache_dir=str(cache_dir))


def _sent(course: Course, store: ThrottledS3) -> Course:
    return replace(course, store_bytes=store.stats().sent_bytes)


def _train(place: Workplace, contender: str, source: str, **how: Any) -> Course:
    return Course(
        **call(
            train, contender=contender, source=source, samples=place.dataset(LARGE).samples, **how
        )
    )


class Logged(IterableDataset[Any]):
    """Appends a line, seconds and url, to a file for each shard whose first sample is yielded."""

    def __init__(self, dataset: Iterable[Any], path: Path) -> None:
        self._dataset = dataset
        self._path = path

    def __iter__(self) -> Iterator[Any]:
        seen: set[str] = set()
        # Lines of several processes stay whole: each is one short write to the end of the file.
        with self._path.open("ab", buffering=0) as log:
            for sample in self._dataset:
                url = sample["__url__"]
                if url not in seen:
                    seen.add(url)
                    log.write(f"{time.monotonic():.6f} {url}\n".encode())
                yield sample


class FromMemory(IterableDataset[Any]):
    """Samples that cost nothing to read: what is waited for them is the loader's own."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._zeros = bytearray(LARGE.sample_bytes)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first = info.id if info else 0
        step = info.num_workers if info else 1
        for number in range(first, self._samples, step):
            # A copy each: pickle sends an object that it has met before as a mere reference.
            yield {"__key__": f"{number:010d}", "__url__": "", "jpg": bytes(self._zeros)}


def train(
    contender: str,
    source: str,
    samples: int,
    *,
    epochs: int = 1,
    seed: int = 7,
    job: str = "training",
    socket: str = "",
    cache_dir: str = "",
    start_after_s: float = 0.0,
    reads: str = "",
) -> Course:
    """Train with a step of a fixed length. Raises RuntimeError for a wrong number of samples.

    Args:
        contender: "shardcache", "webdataset" or "memory", for no reading at all.
        source: brace pattern of the shards: s3 urls for ours, http urls, which go through
            `curl -s`, or local paths for webdataset.
        samples: what one epoch must give.
        epochs: number of epochs, with the same workers.
        socket: of the daemon, where the contender is ours.
        cache_dir: of webdataset's own cache, or empty for none.
        start_after_s: pause before the first epoch.
        reads: file to which each start of a shard is appended, or empty for none; see `Logged`.
    """
    dataset: Any = FromMemory(samples)
    if contender == "shardcache":
        from shardcache_client.dataset import ShardDataset

        how: dict[str, Any] = {
            "epochs": epochs,
            "batch_size": BATCH_SAMPLES,
            "job": job,
            "socket": socket,
        }
        dataset = ShardDataset(source, shuffle=True, shuffle_window=0, seed=seed, **how)
    elif contender == "webdataset":
        from webdataset import WebDataset

        dataset = WebDataset(source, shardshuffle=1000, seed=seed, cache_dir=cache_dir or None)
    loader = loader_of(Logged(dataset, Path(reads)) if reads else dataset)
    time.sleep(start_after_s)
    course = Course()
    for epoch in range(epochs):
        if contender == "shardcache":
            dataset.set_epoch(epoch)
        course = read_epoch(loader, samples, course)
    return course


def loader_of(dataset: Any) -> DataLoader[Any]:
    """Return torch's own loader of lists of samples."""
    return DataLoader(
        dataset,
        batch_size=BATCH_SAMPLES,
        collate_fn=list,
        num_workers=WORKERS,
        persistent_workers=True,
    )


def read_epoch(loader: DataLoader[Any], samples: int, before: Course) -> Course:
    """Read one epoch: each step lasts as long as its samples take, and everything else is waiting.

    Raises RuntimeError where it gives another number of samples.
    """
    read = 0
    waited_s = 0.0
    started_s = asked_s = time.perf_counter()
    first_batch_s = before.first_batch_s
    for batch in loader:
        waited_s += time.perf_counter() - asked_s
        first_batch_s = first_batch_s or waited_s
        read += len(batch)
        time.sleep(len(batch) / SAMPLES_PER_S)
        asked_s = time.perf_counter()
    ended_s = time.perf_counter()
    if read != samples:
        raise RuntimeError(f"a job read {read} samples, the dataset has {samples}")
    return Course(
        before.wall_s + ended_s - started_s,
        before.waited_s + waited_s + ended_s - asked_s,
        first_batch_s,
    )
