"""The first batch over a daemon just started and a private one, next to webdataset by `pipe:curl`.

The training process has imported everything before. Then the daemon is started, and the process
trains as soon as it serves; or it makes its dataset, which starts a private daemon. There, the
clock runs from the construction of the dataset, so that the start of the daemon counts, too. The
store is far away, as in `cold`.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data import LARGE
from benchmarks.downloads.cold import (
    BATCH_SAMPLES,
    STREAMED,
    Course,
    loader_of,
    read_epoch,
    streamed,
)
from benchmarks.measure import Figure, Row, Target, call, interleaved, median_of
from benchmarks.workplace import Daemon, Workplace
from support.programs.daemon import private_home

FRESH = "a daemon that has just started"
PRIVATE = "a private daemon"


def measure(place: Workplace) -> list[Row]:
    """Return medians: seconds to the first batch, and the longest waiting after that."""
    contenders: dict[str, Callable[[], Course]] = {
        FRESH: partial(_fresh, place),
        PRIVATE: partial(_private, place),
        STREAMED: partial(streamed, place),
    }
    tries = interleaved(contenders, place.say, place.rounds)
    first_s = median_of(tries, "first_batch_s")
    later_s = {
        name: Figure((one.waited_s - one.first_batch_s for one in some), max)
        for name, some in tries.items()
    }
    rows: list[Row] = []
    for name in (FRESH, PRIVATE):
        first = f"to the first batch, {name}"
        later = f"waited after the first batch, slowest epoch, {name}"
        target = Target("≤", 0.2) if name == FRESH else None
        rows += [
            Row("s", first, first_s[name], target=target),
            Row("s", first, first_s[name], STREAMED, first_s[STREAMED]),
            Row("s", later, later_s[name], target=Target("≤", 1.0)),
            Row("s", later, later_s[name], STREAMED, later_s[STREAMED]),
        ]
    return rows


def _fresh(place: Workplace) -> Course:
    dataset = place.dataset(LARGE)
    with place.far_store(dataset) as store, place.folder() as cache_dir:
        url = f"s3://{dataset.folder.name}/{dataset.names}"
        found = call(
            train, store.env(), source=url, samples=dataset.samples, cache_dir=str(cache_dir)
        )
        return Course(**found)


def _private(place: Workplace) -> Course:
    dataset = place.dataset(LARGE)
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-bench-") as home,
        place.folder() as cache_dir,
        place.far_store(dataset) as store,
        private_home(Path(home)),
    ):
        env = {**store.env(), "SHARDCACHE_CACHE_DIR": str(cache_dir)}
        url = f"s3://{dataset.folder.name}/{dataset.names}"
        return Course(**call(train, env, source=url, samples=dataset.samples))


def train(source: str, samples: int, cache_dir: str = "") -> Course:
    """Train one epoch over a daemon started for it, the node's in `cache_dir` or a private one."""
    from shardcache_client.dataset import ShardDataset

    with ExitStack() as stack:
        how: dict[str, Any] = {"epochs": 1, "batch_size": BATCH_SAMPLES}
        if cache_dir:
            how["socket"] = str(stack.enter_context(Daemon(Path(cache_dir), "100GB")).socket)
        began_s = time.perf_counter()
        loader = loader_of(ShardDataset(source, shuffle=True, shuffle_window=0, seed=7, **how))
        made_s = time.perf_counter() - began_s
        course = read_epoch(loader, samples, Course())
    return replace(
        course,
        wall_s=course.wall_s + made_s,
        waited_s=course.waited_s + made_s,
        first_batch_s=course.first_batch_s + made_s,
    )
