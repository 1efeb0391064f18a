"""Division of an epoch into global batches, the same for any number of ranks and workers. Pure.

A global batch is a batch of all ranks together. The epoch is cut into a fixed number of spans, each
with an order of its own. A global batch has the next few samples of each span, one span after
another, however many ranks there are. With 12 samples, 2 spans and global batches of 4 samples, and
without a shuffle:

    global batch             0          1          2
    samples of span 0        0 1        2 3        4 5
    samples of span 1        6 7        8 9        10 11

Each rank takes an equal part of every global batch, in order. Of two ranks, rank 0 reads 0 1, 2 3
and 4 5. Of four ranks, rank 0 reads 0, 2 and 4: places at regular distances in its span.

Progress is a single number: the number of global batches taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal, Spare
from shardcache_client.order.sequences.lane_turns import BlockTurns
from shardcache_client.order.sequences.lanes import Interleaved, Lane, Share, Strided
from shardcache_client.order.sequences.partition import Even, Partition, Phase
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.sources.courses import GlobalBatches
from shardcache_client.order.topology import Topology


@dataclass(frozen=True)
class ElasticDeal(SpanDeal):
    """Deals global batches of samples, to which each of `span_count` spans gives equally many.

    An epoch consists of whole global batches. With `even="pad"` the last batch is filled with
    samples that come next in the order; with "drop" it is left out unless it is whole.

    Attributes:
        span_deal: the deal that determines the order of each span.
        global_batch_size: number of samples in a batch of all ranks together.
        span_count: number of spans of the epoch, which divides `global_batch_size`.
    """

    span_deal: SpanDeal
    global_batch_size: int
    span_count: int = 1

    @property
    def even(self) -> Even:  # type: ignore[override]  # read only
        """Policy for an epoch whose samples do not make whole global batches."""
        return self.span_deal.even

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch; see `SpanDeal`."""
        return self.span_deal.epoch_samples

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples of an epoch; see `SpanDeal`."""
        return self.span_deal.samples_in(epoch)

    def batches_in(self, epoch: int) -> int:
        """Return the number of global batches in an epoch."""
        return self._batches(self.samples_in(epoch))

    def _batches(self, samples: int) -> int:
        """Return the number of global batches that this number of samples makes."""
        form = GlobalBatches(self.global_batch_size, self.span_count, drop=self.even == "drop")
        return form.batches(samples)

    def partition(self, topology: Topology) -> Partition:
        """Return the division of the epoch, whose batches are a rank's parts of global batches."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        return Partition(topology.world_size, self.even, size)

    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order of a span, which may reach beyond the end of the epoch."""
        return self.span_deal.lane(epoch, span)

    @property
    def scattered(self) -> Sequence[range]:
        """Ranges of shards that are each permuted as a whole; see `SpanDeal`."""
        return self.span_deal.scattered

    def share(self, epoch: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return a rank's parts of all global batches of an epoch; see `SpanDeal`."""
        # Global batches are the same for any number of ranks, so the epoch is never divided again.
        # `Progress` counts the batches that have been read instead.
        assert not phases
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        samples = self.batches_in(epoch) * size
        if not samples:
            return Share((), samples=0)

        lanes = self._lanes(epoch, topology.rank * size, size)
        turns = BlockTurns(tuple(lane.width for lane in lanes))
        # The share has the places from 0 to `samples` of the lanes.
        return Share((Interleaved(0, samples, turns, lanes),), samples)

    def _lanes(self, epoch: int, low: int, size: int) -> tuple[Strided, ...]:
        """Return the places of each span that a rank needs for its parts of the global batches.

        Args:
            epoch: number of the epoch.
            low: place in a global batch at which the rank's part begins.
            size: number of samples of this part.
        """
        batches = self.batches_in(epoch)
        # A span gives `piece` places to each global batch, and has `length` places in all.
        piece = self.global_batch_size // self.span_count
        length = batches * piece
        last = low + size - 1
        lanes = []
        # In each global batch, the places from `low` to `last` are in the pieces of these spans.
        for span in range(low // piece, last // piece + 1):
            start = max(0, low - span * piece)
            stop = min(piece, last + 1 - span * piece)
            width = stop - start
            # From the span's piece of each batch, the rank takes the places from `start` to `stop`.
            places = Strided(
                start=0,
                stop=batches * width,
                lane=self.lane(epoch, (span * length, (span + 1) * length)),
                first=start,
                width=width,
                period=piece,
            )
            lanes.append(places)
        return tuple(lanes)

    def mixture_of(self, epoch: int) -> MixtureState | None:
        """Return the facts about a mixture in an epoch; see `SpanDeal`."""
        return self.span_deal.mixture_of(epoch)

    @property
    def has_source_batches(self) -> bool:
        """True if each global batch is of one source; see `SpanDeal`."""
        return self.span_deal.has_source_batches

    def spare(self, epoch: int, topology: Topology, place: int) -> Spare:
        """Return the samples among which substitutes are found; see `SpanDeal`."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        batch, place_in_part = divmod(place, size)
        place_in_batch = topology.rank * size + place_in_part

        # The epoch of all ranks has one span after another, each with a piece of every batch.
        piece = self.global_batch_size // self.span_count
        span, place_in_piece = divmod(place_in_batch, piece)
        span_start = span * self.batches_in(epoch) * piece
        place_in_epoch = span_start + batch * piece + place_in_piece
        of_source = self.span_deal.spare_of_source(epoch, place_in_epoch)
        if of_source is not None:
            return of_source

        # Substitutes are the same for any number of ranks: they are those of a single rank, which
        # reads whole global batches.
        single_rank_place = batch * self.global_batch_size + place_in_batch
        return super().spare(epoch, Topology(), single_rank_place)

    def ends_together(
        self, epoch: int, partition: Partition, phases: Sequence[Phase], *, drop_last: bool = False
    ) -> bool:
        """Return True: all ranks have a part of every global batch; see `SpanDeal`."""
        return True

    def rank_size(self, topology: Topology) -> int:
        """Return the number of samples of the rank's share."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        return self._batches(self.epoch_samples) * size


def batch_size_of_rank(global_batch_size: int, world_size: int) -> int:
    """Return the size of each rank's part of a global batch.

    Raises ConfigError if the parts would not be equal.
    """
    if global_batch_size % world_size:
        raise ConfigError(
            f"global_batch_size={global_batch_size} cannot be divided among {world_size} ranks",
            remedy="use a number of ranks that divides it",
        )
    return global_batch_size // world_size
