"""Mixing of an epoch: ours next to webdataset's shuffle buffer of 5,000. No bytes are read.

One reader goes through shards of equal size. webdataset's own stages run for real, over numbers in
place of samples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Row, Target
from benchmarks.workplace import Workplace
from shardcache_client.order.sequences.mixes import Mix
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sequences.rounds import Order

SAMPLES = 500_000
SHARD_SAMPLES = 2_500
WINDOW = 8
BUFFER = 5_000
_SEED = 7
_SHARD_BUFFER = 100  # what WebDataset(shardshuffle=True) means
_LEAST_SHARDS = 100  # with fewer, the largest window would be most of the epoch

Served = NDArray[np.int64]
"""The sample at each place of an epoch, by its number in the order of the files."""


def measure(place: Workplace) -> list[Row]:
    """Return how far apart neighbours of a shard come by our order, next to webdataset's buffer."""
    shards = max(_LEAST_SHARDS, round(SAMPLES * place.scale) // SHARD_SAMPLES)
    figures = [apart(serve(shards)) for serve in (ours, webdataset)]
    what = f"between neighbours, shards of {SHARD_SAMPLES:,}, window {WINDOW}"
    return [
        Row(
            "samples apart",
            what,
            figures[0],
            f"webdataset shuffle({BUFFER})",
            figures[1],
            Target("≥", 1.0),
        )
    ]


def apart(served: Served) -> float:
    """Return how many places lie between two samples that follow each other in a shard, on average.

    In a buffer, a sample waits for a time that is distributed exponentially, so that two neighbours
    come a buffer's size apart; in a window its time is uniform, and they come a third of the
    window's samples apart. Raises ValueError where a sample was not served exactly once.
    """
    samples = np.arange(len(served))
    if not np.array_equal(np.sort(served), samples):
        raise ValueError(f"the {len(served)} samples served are not every sample once")
    places = np.empty_like(served)
    places[served] = samples
    return float(np.abs(np.diff(places.reshape(-1, SHARD_SAMPLES), axis=1)).mean())


def ours(shards: int) -> Served:
    """The first epoch of a dataset, read by a single reader."""
    order = Order([SHARD_SAMPLES] * shards, Shuffle(_SEED, WINDOW))
    mix = Mix(order.pieces(0, order.samples), WINDOW)
    return np.fromiter(_mixed(mix), np.int64, order.samples)


def _mixed(mix: Mix) -> Iterator[int]:
    @lru_cache(mix.window)
    def samples(piece: int) -> Sequence[int]:
        first = mix.pieces[piece].shard * SHARD_SAMPLES
        return [
            first + number for number in mix.pieces[piece].numbers(SHARD_SAMPLES, permuted=True)
        ]

    for step in range(mix.steps):
        parts = [mix.part(piece, step, samples(piece)) for piece in mix.pieces_at(step)]
        come = [iter(part) for part in parts]
        yield from (
            next(come[place]) for place in mix.interleaved(step, [len(part) for part in parts])
        )


def webdataset(shards: int, buffer: int = BUFFER) -> Served:
    """`WebDataset(…, shardshuffle=100).shuffle(buffer)`, without what opens and reads the tars."""
    import webdataset as wds

    def expand(urls: Iterable[Mapping[str, str]]) -> Iterator[int]:
        for url in urls:
            first = int(url["url"]) * SHARD_SAMPLES
            yield from range(first, first + SHARD_SAMPLES)

    pipeline = wds.DataPipeline(
        wds.SimpleShardList([str(shard) for shard in range(shards)]),
        wds.shuffle(_SHARD_BUFFER, seed=_SEED),
        expand,
        wds.shuffle(buffer, seed=_SEED),
    )
    return np.fromiter(pipeline, np.int64, shards * SHARD_SAMPLES)
