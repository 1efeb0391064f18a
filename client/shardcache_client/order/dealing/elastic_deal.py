"""Division of an epoch into global batches, the same for any number of ranks and workers. Pure.

The epoch is cut into a fixed number of spans, each with an order of its own, and a global batch is
the next few samples of each span, one span after another, however many ranks there are. Each rank
takes an equal part of every global batch, in order, and its workers take these parts in turn, as a
DataLoader asks them for batches. So a reader reads places at regular distances in each span that it
needs. Progress is a single number, that of the global batches taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal, Spare
from shardcache_client.order.sequences.lanes import Interleaved, Lane, Share, Strided
from shardcache_client.order.sequences.partition import Even, Partition, Phase
from shardcache_client.order.sequences.rounds import Topology
from shardcache_client.order.sequences.turns import BlockTurns
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.sources.courses import GlobalBatches


@dataclass(frozen=True)
class ElasticDeal(SpanDeal):
    """Deals global batches of samples, with equal parts of `span_count` spans.

    An epoch is whole global batches: with `even="pad"` the last one is filled with samples that
    come next in the order, with "drop" it is left out unless it is whole.

    Attributes:
        spans: the deal that determines the order of each span.
        global_batch_size: number of samples in a batch of all ranks.
        span_count: number of spans; it divides the size of a global batch.
    """

    spans: SpanDeal
    global_batch_size: int
    span_count: int = 1

    @property
    def even(self) -> Even:  # type: ignore[override]  # read only
        """Policy for a number of samples that is not whole global batches."""
        return self.spans.even

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self.spans.epoch_samples

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples of an epoch; see `SpanDeal`."""
        return self.spans.samples_in(epoch)

    def batches_in(self, epoch: int) -> int:
        """Return the number of global batches in an epoch."""
        return self._batches(self.samples_in(epoch))

    def _batches(self, samples: int) -> int:
        """Return the number of global batches that samples make."""
        form = GlobalBatches(self.global_batch_size, self.span_count, drop=self.even == "drop")
        return form.batches(samples)

    def cut(self, topology: Topology) -> Partition:
        """Return the division of the epoch; each rank has its part of a global batch."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        return Partition(topology.world_size, self.even, size)

    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order of a span of the epoch, which may reach beyond its end."""
        return self.spans.lane(epoch, span)

    @property
    def scattered(self) -> Sequence[range]:
        """Those of its spans; see `SpanDeal`."""
        return self.spans.scattered

    def share(
        self, epoch: int, shift: int, topology: Topology, phases: Sequence[Phase] = ()
    ) -> Share:
        """Return a reader's parts of the remaining global batches; see `SpanDeal`."""
        reader = (topology.reader + shift) % topology.readers
        rank, worker = divmod(reader, topology.workers)
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        first = batches_before(phases) + worker
        remaining = self.batches_in(epoch) - first
        batches = max(0, -(-remaining // topology.workers))  # each worker takes every nth of them
        if not batches:
            return Share((), 0)

        low = rank * size
        lanes = self._lanes(epoch, low, size, first=first, batches=batches, every=topology.workers)
        turns = BlockTurns(tuple(lane.width for lane in lanes))
        samples = batches * size
        return Share((Interleaved(0, samples, turns, lanes),), samples)

    def _lanes(
        self, epoch: int, low: int, size: int, *, first: int, batches: int, every: int
    ) -> tuple[Strided, ...]:
        """Return the places of each span that a reader needs for its part of some global batches.

        Args:
            epoch: number of the epoch.
            low: place in a global batch at which the reader's part begins.
            size: number of samples of this part.
            first: number of the first of these batches.
            batches: number of them.
            every: distance from one to the next.
        """
        # Number of places that a span gives to a global batch, and that it has in all.
        piece = self.global_batch_size // self.span_count
        length = self.batches_in(epoch) * piece
        high = low + size
        lanes = []
        for span in range(low // piece, -(-high // piece)):
            start = max(0, low - span * piece)
            stop = min(piece, high - span * piece)
            width = stop - start
            lane = self.lane(epoch, (span * length, (span + 1) * length))
            places = Strided(
                start=0,
                stop=batches * width,
                lane=lane,
                first=first * piece + start,
                width=width,
                period=every * piece,
            )
            lanes.append(places)
        return tuple(lanes)

    def mixture_of(self, epoch: int) -> MixtureState | None:
        """Return the facts about a mixture in an epoch; see `SpanDeal`.

        The number of global batches taken is the position in all of its spans.
        """
        return self.spans.mixture_of(epoch)

    @property
    def has_source_batches(self) -> bool:
        """True if each global batch is of one source; see `SpanDeal`."""
        return self.spans.has_source_batches

    def spare(self, epoch: int, rank: Topology, place: int) -> Spare:
        """Return the samples among which substitutes are found; see `SpanDeal`."""
        size = batch_size_of_rank(self.global_batch_size, rank.world_size)
        batch, nth = divmod(place, size)
        place_in_span = batch * self.global_batch_size // self.span_count
        of_source = self.spans.spare_of_source(epoch, place_in_span)
        if of_source is not None:
            return of_source

        # By its place among those of all ranks, which is the same for any number of them.
        rank_start = batch * self.global_batch_size + rank.rank * size
        return super().spare(epoch, Topology(), rank_start + nth)

    def ends_together(
        self, epoch: int, cut: Partition, phases: Sequence[Phase], *, drop_last: bool = False
    ) -> bool:
        """Return True: all ranks have a part of every global batch."""
        return True

    def rank_size(self, topology: Topology) -> int:
        """Return the number of samples of the rank's share."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        return self._batches(self.epoch_samples) * size


def batches_before(phases: Sequence[Phase]) -> int:
    """Return the number of global batches taken in earlier phases of an epoch.

    One that was begun is read again.
    """
    # A phase has the number of samples taken by each worker of a rank, all of whom are in step.
    return sum(taken // phase.cut.batch_size for phase in phases for taken in phase.taken)


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
