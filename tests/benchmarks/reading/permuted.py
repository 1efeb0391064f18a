"""A permutation of all samples from a distant store: waiting, bytes, and quality of mixing.

Next to a window of shards, and what peers have: webdataset's shuffle buffer, LanceDB's permutation,
and the order "py1e" of MosaicML's Streaming, in blocks of its default size, and in those that fit
into the disk of `permuted_epochs`. The mixing is that of an epoch of numbers, of which no bytes are
read: how far apart neighbours of a shard come, as a share of what they do in a permutation drawn at
random, a third of all samples.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks import peers
from benchmarks.measure import Row
from benchmarks.peers import LANCEDB_TABLE
from benchmarks.reading import shuffle
from benchmarks.reading.permuted_epochs import LANCEDB, MOSAICML, MOSAICML_BLOCKS, WINDOW, reading
from benchmarks.reading.shuffle import SHARD_SAMPLES, Served
from benchmarks.workplace import Workplace
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sequences.scatter import ScatteredOrder

_BUFFER = 1_000
_PY1E_BLOCK = 1 << 18  # the default of shuffle_block_size
_SEED = 7


def measure(place: Workplace) -> Iterator[Row]:
    """Yield waiting, bytes and first batch of two epochs, and the mixing of each order."""
    yield from reading(place)
    yield from _mixing(place)


def _mixing(place: Workplace) -> Iterator[Row]:
    shards = max(100, round(shuffle.SAMPLES * place.scale) // SHARD_SAMPLES)
    orders: dict[str, Callable[[int], Served]] = {
        WINDOW: shuffle.ours,
        f"webdataset shuffle({_BUFFER})": partial(shuffle.webdataset, buffer=_BUFFER),
        LANCEDB: _lancedb_rows,
        MOSAICML: partial(_py1e, block_samples=shards * SHARD_SAMPLES // MOSAICML_BLOCKS),
        f"{MOSAICML}, default block": partial(_py1e, block_samples=_PY1E_BLOCK),
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


def _lancedb_rows(shards: int) -> Served:
    """`StreamingDataset` of LanceDB over a table of numbers."""
    import lancedb
    import pyarrow
    from lancedb.streaming import StreamingDataset

    numbers = pyarrow.table({"number": np.arange(shards * SHARD_SAMPLES)})
    with tempfile.TemporaryDirectory(prefix="shardcache-bench-") as folder:
        table = lancedb.connect(folder).create_table(LANCEDB_TABLE, numbers)
        dataset = StreamingDataset(table, shuffle_seed=_SEED)
        return np.fromiter((row["number"] for row in dataset), np.int64, len(numbers))


def _py1e(shards: int, block_samples: int) -> Served:
    """`StreamingDataset(shuffle_algo="py1e")` on one node: its own function, without reading."""
    peers.mosaicml()
    from streaming.base.shuffle import get_shuffle

    sizes = np.full(shards, SHARD_SAMPLES, np.int64)
    served: Served = np.asarray(get_shuffle("py1e", sizes, 1, _SEED, 0, block_samples), np.int64)
    return served
