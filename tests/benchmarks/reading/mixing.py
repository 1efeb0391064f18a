"""Figures of how well an order mixes the samples of a dataset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Served = NDArray[np.int64]
"""For each place of an epoch, the sample that is served there, by its number in the order of the files."""

BATCH = 256
NEARBY = 100


@dataclass(frozen=True, slots=True)
class Quality:
    """Remains of the files' order in an order of samples."""

    neighbours_apart: float  # how many places lie between two samples that follow each other in a shard, on average
    nearby_apart: float  # the same for two samples of a shard that are at most `NEARBY` apart in it
    epoch_correlation: float  # Pearson's, between the order of the files and the order served
    shard_correlation: float  # how much it is within a shard, whichever its sign: the mean over all shards
    shards_in_batch: float  # how many different shards a batch of `BATCH` has samples of, on average


def quality_of(served: Served, shard_samples: int) -> Quality:
    """Judge an epoch in which every sample was served once, from shards of one size.

    Raises ValueError where a sample was not served exactly once.
    """
    samples = np.arange(len(served))
    if not np.array_equal(np.sort(served), samples):
        raise ValueError(f"the {len(served)} samples served are not every sample once")
    places = np.empty_like(served)
    places[served] = samples
    by_shard = places.reshape(-1, shard_samples)
    return Quality(
        neighbours_apart=_mean_distance(by_shard, 1),
        nearby_apart=_mean_distance(by_shard, NEARBY),
        epoch_correlation=float(np.corrcoef(samples, places)[0, 1]),
        shard_correlation=_mean_correlation(by_shard),
        shards_in_batch=_mean_shards(served // shard_samples),
    )


def _mean_distance(places: Served, furthest: int) -> float:
    steps = range(1, furthest + 1)
    distance = sum(float(np.abs(places[:, step:] - places[:, :-step]).sum()) for step in steps)
    return distance / sum(places[:, step:].size for step in steps)


def _mean_correlation(places: Served) -> float:
    numbers = np.arange(places.shape[1]) - (places.shape[1] - 1) / 2
    deviations = places - places.mean(axis=1, keepdims=True)
    squares = (deviations**2).sum(axis=1) * (numbers**2).sum()
    return float(np.abs(deviations @ numbers / np.sqrt(squares)).mean())


def _mean_shards(shards: Served) -> float:
    whole = len(shards) // BATCH * BATCH
    batches = np.sort(shards[:whole].reshape(-1, BATCH), axis=1)
    return 1 + float((np.diff(batches, axis=1) != 0).sum(axis=1).mean())
