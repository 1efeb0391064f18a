"""A cold epoch from a store that is far away, with a training step of a fixed length, next to webdataset.

The clock runs from `iter(loader)` to the end of the iteration: for every contender the start of the loader's workers
counts, the import of its packages and the construction of its dataset do not. The daemon's cache is empty, and no
contender finds what it reads from local disk in memory. All shuffle their shards and read the samples of each as they
were written, but for one row, in which ours mixes them as it does by default: samples come from anywhere in a shard
then, so that the first one waits for a whole shard, and those after it for one more at a time until the window is full.

Whatever is read, the main process takes each batch out of a pipe, and its step does not run meanwhile: the row
next to samples from memory shows how much of the waiting is that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.data import LARGE
from benchmarks.measure import interleaved, python, run
from benchmarks.reading.training import WORKERS, Course, Task
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace, forget

SAMPLES_PER_S = 1000.0

OURS = "shardcache"
WINDOW = 8
MIXED = f"shardcache, window {WINDOW}"
LOCAL, STREAMED, CACHED = "webdataset, local disk", "webdataset, streamed", "webdataset, its cache"
MEMORY = "samples from memory"


@dataclass(frozen=True, slots=True)
class Cold:
    """One epoch, and what the store sent for it."""

    course: Course
    store_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.course}, {self.store_bytes / 1e6:,.0f} MB from the store"


def measure(place: Workplace) -> list[Row]:
    """Return waiting, seconds to the first batch and bytes from the store, the median of all rounds each."""
    contenders: dict[str, Callable[[], Cold]] = {
        OURS: partial(_shardcache, place),
        MIXED: partial(_shardcache, place, window=WINDOW),
        LOCAL: partial(_local, place),
        STREAMED: partial(_streamed, place),
        CACHED: partial(_cached, place),
        MEMORY: partial(_memory, place),
    }
    tries = interleaved(contenders, place.say, place.rounds)
    waiting = {name: median(one.course.waiting_percent for one in some) for name, some in tries.items()}
    first_s = {name: median(one.course.first_batch_s for one in some) for name, some in tries.items()}
    waits, first = f"% of a cold epoch spent waiting, {WORKERS} workers", "s to the first batch"
    store_mb = median(one.store_bytes for one in tries[OURS]) / 1e6
    return [
        Row("cold", waits, waiting[OURS], LOCAL, waiting[LOCAL], Target("≤", 1.0)),
        *(Row("cold", waits, waiting[OURS], peer, waiting[peer]) for peer in (STREAMED, CACHED, MEMORY, MIXED)),
        Row("cold", first, first_s[OURS], target=Target("≤", 0.5)),
        *(Row("cold", first, first_s[OURS], peer, first_s[peer]) for peer in (LOCAL, STREAMED, CACHED, MIXED)),
        Row("cold", "MB from the store", store_mb, "the dataset", place.dataset(LARGE).tar_bytes / 1e6, Target("=", 1)),
    ]


def _shardcache(place: Workplace, window: int = 0) -> Cold:
    dataset = place.dataset(LARGE)
    with place.far_store(dataset) as store, place.daemon(store=store) as daemon:
        url = f"s3://{dataset.folder.name}/{dataset.names}"
        course = _train(place, "shardcache", url, socket=str(daemon.socket), window=window)
        return Cold(course, store.stats().sent_bytes)


def _local(place: Workplace) -> Cold:
    dataset = place.dataset(LARGE)
    forget(dataset.shards)
    return Cold(_train(place, "webdataset", f"{dataset.folder}/{dataset.names}"))


def _streamed(place: Workplace) -> Cold:
    dataset = place.dataset(LARGE)
    with place.far_store(dataset) as store:
        course = _train(place, "webdataset", store.http_url(dataset.folder.name, dataset.names))
        return Cold(course, store.stats().sent_bytes)


def _cached(place: Workplace) -> Cold:
    dataset = place.dataset(LARGE)
    with place.far_store(dataset) as store, place.folder() as cache_dir:
        url = store.http_url(dataset.folder.name, dataset.names)
        course = _train(place, "webdataset", url, cache_dir=str(cache_dir))
        return Cold(course, store.stats().sent_bytes)


def _memory(place: Workplace) -> Cold:
    return Cold(_train(place, "memory", ""))


def _train(place: Workplace, contender: str, source: str, **how: Any) -> Course:
    task = Task(
        contender=contender,
        source=source,
        samples=place.dataset(LARGE).samples,
        sample_bytes=LARGE.sample_bytes,
        samples_per_s=SAMPLES_PER_S,
        **how,
    )
    return course_of(run(python("reading.training", task.to_json())).output)


def course_of(output: str) -> Course:
    """Return what a job printed."""
    return Course(**json.loads(output.splitlines()[-1]))
