"""Division of a dataset's epochs among its readers, by spans of samples or by whole shards. Pure.

`DealOptions` make a deal, and the dataset's readers ask the deal for their shares.

- A reader is a rank. Where the workers of a plain DataLoader read independently of each other, each
  worker is a reader.
- A span is a range of consecutive samples of an epoch.
- A share is everything that one reader reads of an epoch, or of what is left of it.
- A round is one pass over all samples of a dataset. Epochs take samples from an endless sequence of
  rounds.
- A phase is a part of an epoch that was read by the same ranks, before the job resumed with others.
- A substitute is a sample that takes the place of one that cannot be read.

The division depends on manifest, shuffle, evenness and topology alone. `elastic_deal` has the
division into global batches, which are the same for any number of ranks and workers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple, TypeAlias

from shardcache_client.order.sequences.lanes import Lane, Share
from shardcache_client.order.sequences.mixes import Mix
from shardcache_client.order.sequences.partition import Even, Partition, Phase, rest_after
from shardcache_client.order.sequences.permutations import (
    Shuffle,
    round_key,
    shard_order,
    window_of,
)
from shardcache_client.order.sequences.rounds import ListedPieces, Piece
from shardcache_client.order.sequences.scatter import EndlessOrder, lane_of, order_of
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.topology import Topology

# The readers of one process ask for the rest of the same epoch, one after another: so the rest is
# kept.
_rest_after = lru_cache(maxsize=4)(rest_after)


class Spare(NamedTuple):
    """Samples among which substitutes for a skipped sample are found.

    Attributes:
        share: the samples.
        place: place of the skipped sample in `share`.
        pass_places: number of consecutive places, from any place on, that hold every sample. Where
            one round ends and the next begins, this takes more places than there are samples.
        source: number of the source that the samples belong to; 0 if they are of all sources.
    """

    share: Share
    place: int
    pass_places: int
    source: int = 0


class SpanDeal(ABC):
    """Deals samples: every reader gets a contiguous span of the epoch.

    Attributes:
        even: policy for a number of samples that the ranks do not divide.
        batch_size: number of samples in a batch of a rank.
        counted: True, since samples are dealt by number. `ShardDeal` has False.
    """

    even: Even
    batch_size: int

    counted: ClassVar[bool] = True

    @property
    @abstractmethod
    def epoch_samples(self) -> int:
        """Number of samples of a whole epoch over all ranks, before any padding."""

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples of an epoch.

        All epochs have the same number, except for an epoch that a change of a mixture cut short.
        """
        return self.epoch_samples

    def for_ranks(self, world_size: int) -> "SpanDeal":
        """Return the deal for `world_size` ranks: the same object for the same number.

        Only batches of one source each depend on the number: see `MixtureDeal`.
        """
        return self

    def pass_places(self, epoch: int) -> int | None:
        """Return the number of consecutive places that hold every sample; see `Spare`.

        None if this number is unknown.
        """
        return None

    @abstractmethod
    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order in which the reader of a span of the epoch reads it.

        Args:
            epoch: number of the epoch.
            span: start and stop of the reader's samples in the epoch.
        """

    def partition(self, topology: Topology) -> Partition:
        """Return the division of the epoch among the readers of a job."""
        return Partition(topology.world_size, self.even, self.batch_size)

    def share(self, epoch: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return a reader's share of the rest of an epoch.

        Args:
            epoch: number of the epoch.
            topology: the reader, as a rank.
            phases: phases of the epoch that have been read.
        """
        rank = topology.rank
        partition = self.partition(topology)
        first_partition = phases[0].partition if phases else partition
        samples = self.samples_in(epoch)
        rest = _rest_after(samples, tuple(phases), partition)

        segments = []
        for start_in_rest, stop_in_rest in partition.spans(len(rest), rank):
            # The samples that are left lie in the spans that the readers had when the epoch began,
            # and keep the order in which these readers would have read them.
            for first_reader, start, stop in rest.between(start_in_rest, stop_in_rest):
                lane = self.lane(epoch, first_partition.owned_span(samples, first_reader))
                segments.append(lane.between(start, stop))
        return Share(tuple(segments), sum(segment.samples for segment in segments))

    def ends_together(
        self, epoch: int, partition: Partition, phases: Sequence[Phase], *, drop_last: bool = False
    ) -> bool:
        """Return True if all ranks make the same number of batches of what is left of an epoch.

        Args:
            epoch: number of the epoch.
            partition: division of the rest.
            phases: phases of the epoch that have been read.
            drop_last: True to leave out a rank's last batch unless it is whole.
        """
        rest = _rest_after(self.samples_in(epoch), tuple(phases), partition)
        batch_counts = {
            partition.batches(len(rest), rank, drop_last=drop_last)
            for rank in range(partition.world_size)
        }
        return len(batch_counts) == 1

    def mixture_of(self, epoch: int) -> MixtureState | None:
        """Return the facts about a mixture in an epoch; None if the dataset is not a mixture."""
        return None

    @property
    def has_source_batches(self) -> bool:
        """True if each batch of a mixture is of one source."""
        return False

    @property
    def scattered(self) -> Sequence[range]:
        """Ranges of shards, by number in the manifest, each permuted as a whole."""
        return ()

    def spare(self, epoch: int, topology: Topology, place: int) -> Spare:
        """Return the samples among which substitutes for a skipped sample are found.

        Args:
            epoch: number of the epoch.
            topology: the rank that has skipped a sample.
            place: place of the skipped sample in the rank's epoch.
        """
        # All samples of the epoch may be substitutes: they are the share of a job's only rank.
        share = self.share(epoch, Topology())
        samples = share.samples
        rank_start, _ = self.partition(topology).owned_span(samples, topology.rank)
        # The place of the last rank's padding is beyond the end of the epoch.
        place_in_epoch = (rank_start + place) % samples
        # If it is unknown how soon every sample comes, the whole epoch is tried.
        pass_places = self.pass_places(epoch) or samples
        return Spare(share, place_in_epoch, pass_places)

    def spare_of_source(self, epoch: int, place: int) -> Spare | None:
        """Return the samples of the source that has a skipped sample, as its substitutes.

        None if batches have samples of several sources: then samples of any source will do.

        Args:
            epoch: number of the epoch.
            place: place of the skipped sample in the epoch of all ranks.
        """
        return None

    def rank_size(self, topology: Topology) -> int:
        """Return the number of samples that a rank reads in an epoch."""
        return self.partition(topology).size(self.epoch_samples, topology.rank)


@dataclass(frozen=True)
class SampleDeal(SpanDeal):
    """Deals the samples of one dataset.

    Attributes:
        counts: number of samples of each shard.
        shuffle: None to read in the order of the shards.
        even: see `SpanDeal`.
        batch_size: see `SpanDeal`.
        samples_per_epoch: number of samples that each epoch takes of the endless sequence of
            rounds; None for as many as a round has.
    """

    counts: Sequence[int]
    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    @cached_property
    def _order(self) -> EndlessOrder:
        """The endless sequence of the dataset."""
        return order_of(self.counts, self.shuffle)

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch; see `SpanDeal`."""
        if self.samples_per_epoch is not None:
            return self.samples_per_epoch
        return self._order.samples

    def pass_places(self, epoch: int) -> int:
        """Return the number of consecutive places that hold a whole round, wherever they begin.

        Two rounds are enough: a range of this size that begins within a round has all of the next.
        """
        return 2 * self._order.samples

    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order in which the reader of a span of the epoch reads it; see `SpanDeal`."""
        begin = epoch * self.epoch_samples
        start, stop = span
        return lane_of(self._order, window_of(self.shuffle), begin + start, begin + stop)

    @property
    def scattered(self) -> Sequence[range]:
        """All shards, if the shuffle is global; see `SpanDeal`."""
        if self.shuffle is not None and self.shuffle.is_global:
            return [range(len(self.counts))]
        return ()


@dataclass(frozen=True)
class ShardDeal:
    """Deals whole shards whose numbers of samples are not known yet.

    Each shard is read once. With `samples_per_epoch`, the shards are read again and again until all
    ranks together have yielded as many samples.

    Attributes:
        shards: number of shards.
        shuffle: None to read in the order of the shards.
        even: policy for a `samples_per_epoch` that the ranks do not divide.
        batch_size: number of samples in a batch of a rank.
        samples_per_epoch: number of samples of an epoch over all ranks; None for as many as the
            shards have.
        counted: False, since shards are dealt.
        epoch_samples: None, since the number of samples of an epoch is not known.
        has_source_batches: False, since mixtures have counted samples.
    """

    shards: int
    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    counted: ClassVar[bool] = False
    epoch_samples: ClassVar[None] = None
    has_source_batches: ClassVar[bool] = False

    def partition(self, topology: Topology) -> Partition:
        """Return the division of `samples_per_epoch` among the ranks."""
        return Partition(topology.world_size, self.even, self.batch_size)

    def mix(self, epoch: int, share: int, topology: Topology) -> Mix:
        """Return the order of a share of the epoch.

        The order of all shards is cut into one part for each reader. The reader's own share is the
        part with the reader's number. A reader that needs more samples than that goes on with
        further shares: the next part, then the one after it, until it has had every part. Then the
        shards are put in another order and cut again.

        Args:
            epoch: number of the epoch.
            share: 0 for the reader's own share; 1, 2 and so on for further ones.
            topology: the reader.
        """
        readers = topology.readers
        # The order is the same for as many shares as there are parts.
        first_share = share - share % readers
        order_key = round_key(self.shuffle, epoch, first_share)
        # The numbers of samples are not known, so the groups of a shuffle get equally many shards.
        equal_weights = [1] * self.shards
        order = shard_order(equal_weights, self.shuffle, order_key)
        part = topology.reader + share
        if self.shards < readers and self.samples_per_epoch is not None:
            # Every reader must yield samples, so a part is a single shard, and some readers read
            # the same shard.
            shards: Sequence[int] = [order[part % self.shards]]
        else:
            # Each shard is in one part. If there are fewer shards than readers, some parts are
            # empty.
            start, stop = Partition(readers, even=None).owned_span(self.shards, part % readers)
            shards = order[start:stop]

        # Each share permutes the samples of a shard in another way.
        key = round_key(self.shuffle, epoch, share)
        pieces = ListedPieces(Piece(shard, key) for shard in shards)
        return Mix(pieces, window_of(self.shuffle))

    def rank_size(self, topology: Topology) -> int | None:
        """Return the rank's part of `samples_per_epoch`; None if that is not set."""
        if self.samples_per_epoch is None:
            return None
        return self.partition(topology).size(self.samples_per_epoch, topology.rank)

    def for_ranks(self, world_size: int) -> "ShardDeal":
        """Return this deal; see `SpanDeal`."""
        return self


Deal: TypeAlias = SpanDeal | ShardDeal
"""A division of each epoch into the readers' shares."""
