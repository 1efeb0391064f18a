"""Mixing of an epoch: ours next to webdataset's shuffle buffer of 5,000. No bytes are read.

One reader goes through shards of equal size. webdataset's own stages run for real, over numbers in place of samples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Row, Target
from benchmarks.workplace import Workplace
from shardcache_client.order.lanes import Mix
from shardcache_client.order.rounds import Order, Shuffle

SAMPLES = 500_000
SHARD_SAMPLES = (500, 1_000, 2_500, 10_000)
WINDOWS = (8, 16, 32)
BUFFER = 5_000
PEER = f"webdataset shuffle({BUFFER})"

_SEED = 7
_SHARD_BUFFER = 100  # what WebDataset(shardshuffle=True) means
_LEAST_SHARDS = 100  # with fewer, the largest window would be most of the epoch

Served = NDArray[np.int64]
"""For each place of an epoch, the sample that is served there, by its number in the order of the files."""


def measure(place: Workplace) -> list[Row]:
    """Return how our order mixes next to webdataset's buffer, by the usual window and by one that should suffice."""
    return [row for shard_samples in SHARD_SAMPLES for row in _rows(place, shard_samples)]


def _rows(place: Workplace, shard_samples: int) -> Iterator[Row]:
    shards = max(_LEAST_SHARDS, round(SAMPLES * place.scale) // shard_samples)
    place.say(f"{shards} shards of {shard_samples:,} samples")
    theirs = quality_of(webdataset(shards, shard_samples), shard_samples)
    # A sample waits in a buffer for a time that is distributed exponentially, so that two neighbours come a buffer's
    # size apart; in a window its time is uniform, and they come a third of the window's samples apart.
    enough = next(window for window in WINDOWS if window * shard_samples >= 3 * BUFFER)
    for window in sorted({WINDOWS[0], enough}):
        where = f"shards of {shard_samples:,}, window {window}"
        found = quality_of(ours(window, shards, shard_samples), shard_samples)
        for what, figure, other, sign in zip(
            ("neighbours apart", "correlation in a shard"), found, theirs, "≥≤", strict=True
        ):
            yield Row(
                "shuffle", f"{what}, {where}", figure, PEER, other, Target(sign, 1.0) if window == enough else None
            )


def quality_of(served: Served, shard_samples: int) -> tuple[float, float]:
    """Return what is left of the files' order in an epoch in which every sample was served once.

    First, how many places lie between two samples that follow each other in a shard, on average; second, Pearson's
    correlation of the two orders within a shard, whichever its sign: the mean over all shards. Raises ValueError where
    a sample was not served exactly once.
    """
    samples = np.arange(len(served))
    if not np.array_equal(np.sort(served), samples):
        raise ValueError(f"the {len(served)} samples served are not every sample once")
    places = np.empty_like(served)
    places[served] = samples
    places = places.reshape(-1, shard_samples)
    apart = float(np.abs(np.diff(places, axis=1)).mean())
    numbers = np.arange(shard_samples) - (shard_samples - 1) / 2
    deviations = places - places.mean(axis=1, keepdims=True)
    squares = (deviations**2).sum(axis=1) * (numbers**2).sum()
    return apart, float(np.abs(deviations @ numbers / np.sqrt(squares)).mean())


def ours(window: int, shards: int, shard_samples: int) -> Served:
    """The first epoch of a dataset, read by a single reader."""
    order = Order([shard_samples] * shards, Shuffle(_SEED, window))
    mix = Mix([*order.pieces(0, order.samples)], window)
    return np.fromiter(_mixed(mix, shard_samples), np.int64, order.samples)


def _mixed(mix: Mix, shard_samples: int) -> Iterator[int]:
    @lru_cache(mix.window)
    def samples(piece: int) -> Sequence[int]:
        first = mix.pieces[piece].shard * shard_samples
        return [first + number for number in mix.pieces[piece].numbers(shard_samples, permuted=True)]

    for step in range(mix.steps):
        parts = [mix.part(piece, step, samples(piece)) for piece in mix.pieces_at(step)]
        come = [iter(part) for part in parts]
        yield from (next(come[place]) for place in mix.interleaved(step, [len(part) for part in parts]))


def webdataset(shards: int, shard_samples: int) -> Served:
    """`WebDataset(…, shardshuffle=100).shuffle(5_000)`, without what opens and reads the tars."""
    import webdataset as wds

    def expand(urls: Iterable[Mapping[str, str]]) -> Iterator[int]:
        for url in urls:
            first = int(url["url"]) * shard_samples
            yield from range(first, first + shard_samples)

    pipeline = wds.DataPipeline(
        wds.SimpleShardList([str(shard) for shard in range(shards)]),
        wds.shuffle(_SHARD_BUFFER, seed=_SEED),
        expand,
        wds.shuffle(BUFFER, seed=_SEED),
    )
    return np.fromiter(pipeline, np.int64, shards * shard_samples)
