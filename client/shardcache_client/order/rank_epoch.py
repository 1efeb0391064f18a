"""One rank's epoch as numbered places: their samples, and the shards that they need. Pure.

A place is the number of a sample in what the rank reads of the epoch, from 0. The sample at a place
follows from the place's number alone, so any worker can make any batch without the batches before
it. `batches` asks for the samples of each batch, and for the visits to declare shards to the
daemon.

A visit is a range of places during which a reader needs a shard. With three shards of 4 samples,
mixed two at a time, the reader needs shard 0 for the places 0 to 5, shard 1 for 2 to 9 and shard 2
for 6 to 11.

If the user has selected samples, only the chosen samples of each shard belong to the dataset. The
order numbers these alone, and their numbers in the tar are looked up in the manifest.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property

from shardcache_client.order.sequences.lanes import Share
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.share_places import (
    ChainedPlaces,
    FileRun,
    MixedPlaces,
    SampleId,
    Visit,
    places_of,
)

# Number of shards whose chosen samples are kept, if a dataset has only some samples of its shards:
# as many as a reader usually holds.
_MAX_KEPT_CHOICES = 64


class RankEpoch:
    """The places of a rank's share of an epoch, or of the rest of an epoch.

    Args:
        share: the share. The number of samples of each shard must be known.
        manifest: the shards of the dataset.

    Attributes:
        is_in_file_order: True if the samples of each shard come one after another in file order,
            without any left out by a choice.
    """

    def __init__(self, share: Share, manifest: Manifest) -> None:
        self._manifest = manifest
        counts = manifest.counts or ()
        self._places = ChainedPlaces([places_of(part, counts) for part in share.segments])

        is_mixed = any(part.is_mixed for part in share.segments)
        self.is_in_file_order = manifest.choices is None and not is_mixed
        self._chosen_of: OrderedDict[int, Sequence[int] | None] = OrderedDict()  # by shard

    def __repr__(self) -> str:
        return f"RankEpoch(samples={len(self)})"

    def __len__(self) -> int:
        return self._places.samples

    def between(self, start: int, stop: int) -> list[SampleId]:
        """Return the samples at the places from `start` to `stop`, or to the end of the epoch."""
        return list(self.samples(start, stop))

    def samples(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`, or to the end of the epoch."""
        samples = self._places.between(start, min(stop, len(self)))
        if self._manifest.choices is None:
            return samples
        return map(self._in_tar, samples)

    def runs(self, start: int, stop: int) -> Iterator[FileRun]:
        """Yield the samples at the places from `start` to `stop` as runs of neighbours in a shard.

        `has_runs` must be true.
        """
        for part, first, last in self._places.within(start, stop):
            assert isinstance(part, MixedPlaces)  # as `has_runs` says
            yield from part.runs(first, last)

    @cached_property
    def has_runs(self) -> bool:
        """True if `runs` may be called: places are in file order, without lanes that take turns."""
        are_of_mixes = all(isinstance(part, MixedPlaces) for part in self._places.parts)
        return self.is_in_file_order and are_of_mixes

    def visits(self, start: int = 0) -> Iterator[Visit]:
        """Return the visits that end after the place `start`, in the order in which they begin.

        The visits are made one by one as they are taken, since an epoch may have any length.
        """
        return self._places.visits(start)

    def _in_tar(self, sample: SampleId) -> SampleId:
        """Return a sample by its number in the tar, given its number among the chosen samples."""
        shard, number = sample
        chosen = self._chosen(shard)
        if chosen is None:
            return sample
        return shard, chosen[number]

    def _chosen(self, shard: int) -> Sequence[int] | None:
        """Return the numbers of a shard's chosen samples; None for all samples.

        The numbers are kept, since the samples of a shard are looked up one by one.
        """
        if shard not in self._chosen_of:
            if len(self._chosen_of) >= _MAX_KEPT_CHOICES:
                self._chosen_of.popitem(last=False)
            self._chosen_of[shard] = self._manifest.chosen(shard)
        return self._chosen_of[shard]
