"""A permutation of all samples from a distant store: waiting, bytes, and quality of mixing.

Next to a window of shards, and what peers have: webdataset's shuffle buffer, and the order "py1e"
of MosaicML's Streaming, each at the size that its documentation names. The mixing is that of an
epoch of numbers, of which no bytes are read: how far apart neighbours of a shard come, as a share
of what they do in a permutation drawn at random, a third of all samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from benchmarks import peers
from benchmarks.data import LARGE, Dataset
from benchmarks.downloads.cold import BATCH_SAMPLES, WORKERS, Course, read_epoch
from benchmarks.measure import Figure, Row, Target, call, interleaved, median_of
from benchmarks.reading import shuffle
from benchmarks.reading.shuffle import SHARD_SAMPLES, Served
from benchmarks.workplace import Workplace
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sequences.scatter import ScatteredOrder
from support.programs.cli import shardcache
from support.stores.throttled_s3 import ThrottledS3

GLOBAL = "global"
WINDOW = "window of 8"
_BUFFER = 1_000
_PY1E_BLOCK = 1 << 18  # the default of shuffle_block_size
_SEED = 7


def measure(place: Workplace) -> Iterator[Row]:
    """Yield waiting and bytes of a cold epoch, seconds to its first batch, and each mixing."""
    yield from _reading(place)
    yield from _mixing(place)


# Mixing


def _mixing(place: Workplace) -> Iterator[Row]:
    shards = max(100, round(shuffle.SAMPLES * place.scale) // SHARD_SAMPLES)
    orders: dict[str, Callable[[int], Served]] = {
        WINDOW: shuffle.ours,
        f"webdataset shuffle({_BUFFER})": partial(shuffle.webdataset, buffer=_BUFFER),
        "mosaicml py1e": _py1e,
    }
    what = f"of a random permutation's distance between neighbours, shards of {SHARD_SAMPLES:,}"
    ours = _share(permuted(shards))
    for name, order in orders.items():
        yield Row("share", what, ours, name, _share(order(shards)))


def _share(served: Served) -> float:
    """Return how far apart neighbours come: 1.0 as in a permutation drawn at random."""
    return shuffle.apart(served) / (len(served) / 3)


def permuted(shards: int) -> Served:
    """The first epoch in our order of all samples."""
    order = ScatteredOrder([SHARD_SAMPLES] * shards, Shuffle(_SEED, None))
    numbers = (
        shard * SHARD_SAMPLES + number for shard, number in order.samples_between(0, order.samples)
    )
    return np.fromiter(numbers, np.int64, order.samples)


def _py1e(shards: int) -> Served:
    """`StreamingDataset(shuffle_algo="py1e")` on one node: its own function, without reading."""
    peers.mosaicml()
    from streaming.base.shuffle import get_shuffle

    sizes = np.full(shards, SHARD_SAMPLES, np.int64)
    served: Served = np.asarray(get_shuffle("py1e", sizes, 1, _SEED, 0, _PY1E_BLOCK), np.int64)
    return served


# Reading


def _reading(place: Workplace) -> Iterator[Row]:
    dataset = place.dataset(LARGE)
    with place.far_store(dataset) as store:
        index = _index(place, dataset, store)
        contenders = {
            GLOBAL: partial(_cold, place, store, index, dataset.samples, "global"),
            WINDOW: partial(_cold, place, store, index, dataset.samples, True),
        }
        tries = interleaved(contenders, place.say, place.rounds)
    waiting = median_of(tries, "waiting_percent")
    first_s = median_of(tries, "first_batch_s")
    sent_mb = {name: Figure(each.store_bytes / 1e6 for each in tries[name]) for name in tries}
    what = (
        f"of a cold epoch of {LARGE.label} samples spent waiting, all permuted, {WORKERS} workers"
    )
    yield Row("%", what, waiting[GLOBAL], WINDOW, waiting[WINDOW])
    yield Row("s", "to the first batch, all permuted", first_s[GLOBAL], WINDOW, first_s[WINDOW])
    yield Row(
        "MB",
        "from the store, all permuted",
        sent_mb[GLOBAL],
        "the dataset",
        dataset.tar_bytes / 1e6,
        Target("=", 1),
    )


def _index(place: Workplace, dataset: Dataset, store: ThrottledS3) -> str:
    """Return the path of an index with a table of samples beside it."""
    index = place.root / "permuted" / "index.json"
    index.parent.mkdir(exist_ok=True)
    urls = f"s3://{dataset.folder.name}/{dataset.names}"
    with place.daemon(store=store) as daemon:
        ran = shardcache("index", urls, "-o", index, "--samples", socket=daemon.socket)
    if ran.code:
        raise RuntimeError(f"the shards cannot be indexed: {ran.err}")
    return str(index)


def _cold(place: Workplace, store: ThrottledS3, index: str, samples: int, order: object) -> Course:
    with place.daemon(store=store) as daemon:
        before_bytes = store.stats().sent_bytes
        course = Course(
            **call(train, socket=str(daemon.socket), index=index, samples=samples, order=order)
        )
        return replace(course, store_bytes=store.stats().sent_bytes - before_bytes)


def train(socket: str, index: str, samples: int, order: Literal["global"] | bool) -> Course:
    """Train one epoch with a step of a fixed length."""
    from shardcache_client.dataset import ShardDataset

    dataset = ShardDataset(
        index, shuffle=order, seed=_SEED, batch_size=BATCH_SAMPLES, epochs=1, socket=socket
    )
    loader: Any = dataset.loader(num_workers=WORKERS, collate_fn=list)
    return read_epoch(loader, samples, Course())
