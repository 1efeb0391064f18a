"""Substitutes for bad samples: other samples of the epoch, whichever rank reads them.

A bad sample is one that cannot be read or decoded. If the user's handler skips it, another sample
replaces it in the batch, so that all ranks keep their number of batches.

A place is the number of a sample in an epoch. The spare of a place is the samples among which its
substitutes are found: all samples of the epoch; or all samples of the place's source, if a mixture
makes each batch of one source.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardcache_client.order.dealing.deal import Spare
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.share_places import SampleId
from shardcache_client.reading.epochs.epoch_plans import ReadResult
from shardcache_client.reading.epochs.lone_reader import SampleReader

# Number of places whose samples are tried together, sorted by shard. Opening a shard costs as much
# as decoding some hundred samples, so samples of open shards are tried first.
_BLOCK_PLACES = 64

_GOLDEN_SECTION = (math.sqrt(5) - 1) / 2

# Number of substitutes that are spread over the epoch. More are needed only if most of the samples
# are bad.
_SPREAD_SUBSTITUTES = 16


class _Block(NamedTuple):
    """Samples at `_BLOCK_PLACES` consecutive places, sorted by shard.

    Attributes:
        source: number of the mixture's source; see `Spare`.
        first: the first of the places.
        samples: the samples.
    """

    source: int
    first: int
    samples: Sequence[SampleId]


class Substitutes:
    """The substitutes of one epoch's bad samples. Any thread.

    The substitutes that are tried for a place depend on the place alone. They are spread over the
    epoch in blocks of neighbours. So if several substitutes are tried for a place, or neighbouring
    places need substitutes, these mostly come from shards that are already open.

    Args:
        spare_of: returns the spare of a place in the rank's epoch.
        manifest: the shards of the dataset.
        lone_reader: reads single samples.
    """

    def __init__(
        self, spare_of: Callable[[int], Spare], manifest: Manifest, lone_reader: SampleReader
    ) -> None:
        self._spare_of = spare_of
        self._manifest = manifest
        self._lone_reader = lone_reader
        self._lock = threading.Lock()  # protects the orders and the block
        self._orders: dict[int, RankEpoch] = {}  # samples of spares in their order, by source
        # The last block that was tried. The substitutes for neighbouring places come from it, too.
        self._block: _Block | None = None

    def __call__(self, place: int) -> Iterator[ReadResult]:
        """Yield the results of reading substitutes for a place, until all samples were tried."""
        spare = self._spare_of(place)
        with self._lock:
            places = len(self._order_of(spare))
        tried: set[SampleId] = set()
        for substitute_place in substitute_places(spare.place, places, spare.pass_places):
            for sample in self._samples_from(spare, substitute_place):
                if sample not in tried:
                    tried.add(sample)
                    yield self._lone_reader.read(sample)

    def _samples_from(self, spare: Spare, place: int) -> Sequence[SampleId]:
        """Return the samples of the block that has a place of the spare.

        They are rotated by the place's position in the block, so that neighbouring bad places try
        different samples first.
        """
        first = place - place % _BLOCK_PLACES
        with self._lock:
            block = self._block
            if block is None or (block.source, block.first) != (spare.source, first):
                samples = sorted(self._order_of(spare).between(first, first + _BLOCK_PLACES))
                block = _Block(spare.source, first, samples)
                self._block = block
        offset = place - first
        return [*block.samples[offset:], *block.samples[:offset]]

    def _order_of(self, spare: Spare) -> RankEpoch:
        """Return the spare's samples in the order of their places."""
        if spare.source not in self._orders:
            self._orders[spare.source] = RankEpoch(spare.share, self._manifest)
        return self._orders[spare.source]


def substitute_places(place: int, places: int, pass_places: int) -> Iterator[int]:
    """Yield places of an epoch as substitutes for a place whose sample cannot be read.

    The first 16 substitutes are the golden section of the epoch apart, so that they are spread
    evenly: for place 10 of 100, they begin with 72, 34, 96 and 58. Neighbours have neighbours as
    substitutes, so that the substitutes for a lost shard come from few shards. (This is Kronecker's
    sequence; see Knuth, The Art of Computer Programming, vol. 3, section 6.4.) Then come all
    places, one after another.

    Args:
        place: the place, from 0 to `places` - 1.
        places: number of places of the epoch.
        pass_places: number of consecutive places that hold every sample; see `Spare`.
    """
    step = max(1, round(places * _GOLDEN_SECTION))
    for nth in range(1, _SPREAD_SUBSTITUTES + 1):
        yield (place + nth * step) % places
    for nth in range(1, min(places, pass_places) + 1):
        yield (place + nth) % places
