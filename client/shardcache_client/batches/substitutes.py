"""Substitutes for bad samples: samples of the whole epoch, whichever rank has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardcache_client.order.dealing.deal import Spare
from shardcache_client.order.rank_epoch import RankEpoch, SampleId, substitutes
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.epochs.epoch_plans import ReadResult
from shardcache_client.reading.epochs.lone_reader import SampleReader

# Number of places whose samples are tried together: opening a shard costs as much as decoding some
# hundred samples.
_BLOCK_PLACES = 64


class _Block(NamedTuple):
    """Samples at `_BLOCK_PLACES` consecutive places, sorted by shard.

    Attributes:
        source: as that of a `Spare`.
        first: the first of the places.
    """

    source: int
    first: int
    samples: Sequence[SampleId]


class Substitutes:
    """The substitutes of one epoch's bad samples. Any thread.

    Which ones are tried for a place depends on that place alone. They are spread over the epoch in
    blocks of neighbours. So if several are tried, or several neighbouring places need one, they
    come from shards that are open.

    Args:
        spare: returns the samples among which substitutes for a place are found.
        manifest: of the dataset.
        lone: reads them.
    """

    def __init__(
        self, spare: Callable[[int], Spare], manifest: Manifest, lone: SampleReader
    ) -> None:
        self._spare = spare
        self._manifest = manifest
        self._lone = lone
        self._lock = threading.Lock()
        self._epochs: dict[int, RankEpoch] = {}  # by the source of a spare
        self._block: _Block | None = None  # that of the last place

    def __call__(self, place: int) -> Iterator[ReadResult]:
        """Yield the results of reading substitutes for a place, until all samples were tried."""
        spare = self._spare(place)
        with self._lock:
            places = len(self._epoch_of(spare))
        tried: set[SampleId] = set()
        for number in substitutes(spare.place, places, spare.pass_places):
            for sample in self._samples_from(spare, number):
                if sample not in tried:
                    tried.add(sample)
                    yield self._lone.read(sample)

    def _samples_from(self, spare: Spare, number: int) -> Sequence[SampleId]:
        """Return the samples of the block that has a place.

        They begin at an offset that depends on the place, so that neighbouring bad places try
        different samples first.
        """
        first = number - number % _BLOCK_PLACES
        with self._lock:
            block = self._block
            if block is None or (block.source, block.first) != (spare.source, first):
                samples = sorted(self._epoch_of(spare).between(first, first + _BLOCK_PLACES))
                block = _Block(spare.source, first, samples)
                self._block = block
        start = number - first
        return [*block.samples[start:], *block.samples[:start]]

    def _epoch_of(self, spare: Spare) -> RankEpoch:
        """Return the places of the samples among which substitutes are found."""
        if spare.source not in self._epochs:
            self._epochs[spare.source] = RankEpoch(spare.share, self._manifest)
        return self._epochs[spare.source]
