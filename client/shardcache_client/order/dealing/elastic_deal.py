"""Division of an epoch into global batches, the same for any number of ranks and workers. Pure.

A global batch is a batch of all ranks together. The epoch is cut into a fixed number of spans, each
with an order of its own. A global batch has the next few samples of each span, one span after
another, however many ranks there are. With 12 samples, 2 spans and global batches of 4 samples, and
without a shuffle:

    global batch             0          1          2
    samples of span 0        0 1        2 3        4 5
    samples of span 1        6 7        8 9        10 11

Each rank takes an equal part of every global batch, in order. Of two ranks, rank 0 reads 0 1, 2 3
and 4 5. The workers of a rank take its parts in turn, as a DataLoader asks them for batches. If a
single rank has two workers, worker 0 reads 0 1 6 7 and 4 5 10 11, and worker 1 reads 2 3 8 9. So a
reader reads places at regular distances in each span that it needs.

Progress is a single number: the number of global batches taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal, Spare
from shardcache_client.order.sequences.lanes import Interleaved, Lane, Share, Strided
from shardcache_client.order.sequences.partition import Even, Partition, Phase
from shardcache_client.order.sequences.turns import BlockTurns
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.sources.courses import GlobalBatches
from shardcache_client.order.topology import Topology


@dataclass(frozen=True)
class ElasticDeal(SpanDeal):
    """Deals global batches of samples, to which each of `span_count` spans gives equally many.

    An epoch consists of whole global batches. With `even="pad"` the last batch is filled with
    samples that come next in the order; with "drop" it is left out unless it is whole.

    Attributes:
        spans: the deal that determines the order of each span.
        global_batch_size: number of samples in a batch of all ranks together.
        span_count: number of spans of the epoch, which divides `global_batch_size`.
    """

    spans: SpanDeal
    global_batch_size: int
    span_count: int = 1

    @property
    def even(self) -> Even:  # type: ignore[override]  # read only
        """Policy for an epoch whose samples do not make whole global batches."""
        return self.spans.even

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch; see `SpanDeal`."""
        return self.spans.epoch_samples

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples of an epoch; see `SpanDeal`."""
        return self.spans.samples_in(epoch)

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
        return self.spans.lane(epoch, span)

    @property
    def scattered(self) -> Sequence[range]:
        """Ranges of shards all of whose samples are permuted; see `SpanDeal`."""
        return self.spans.scattered

    def share(self, epoch: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return a reader's parts of the remaining global batches; see `SpanDeal`."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        first = batches_before(phases) + topology.worker
        remaining = self.batches_in(epoch) - first
        # Of n workers, each takes every nth global batch. The division is rounded up, as `first` is
        # this worker's own.
        batches = max(0, -(-remaining // topology.workers))
        if not batches:
            # The share has no parts and no samples.
            return Share((), 0)

        low = topology.rank * size
        lanes = self._lanes(epoch, low, size, first=first, batches=batches, every=topology.workers)
        turns = BlockTurns(tuple(lane.width for lane in lanes))
        samples = batches * size
        # The share has the places from 0 to `samples` of the lanes.
        return Share((Interleaved(0, samples, turns, lanes),), samples)

    def _lanes(
        self, epoch: int, low: int, size: int, *, first: int, batches: int, every: int
    ) -> tuple[Strided, ...]:
        """Return the places of each span that a reader needs for its part of some global batches.

        Args:
            epoch: number of the epoch.
            low: place in a global batch at which the reader's part begins.
            size: number of samples of this part.
            first: number of the first global batch that the reader takes.
            batches: number of global batches that the reader takes.
            every: distance from one of these batches to the next; 1 if the rank has no workers.
        """
        # A span gives `piece` places to each global batch, and has `length` places in all.
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
        """Return the facts about a mixture in an epoch; see `SpanDeal`."""
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

        # The sample's place in the epoch of all ranks is the same for any number of ranks, and so
        # are its substitutes.
        rank_start = batch * self.global_batch_size + rank.rank * size
        return super().spare(epoch, Topology(), rank_start + nth)

    def ends_together(
        self, epoch: int, partition: Partition, phases: Sequence[Phase], *, drop_last: bool = False
    ) -> bool:
        """Return True: all ranks have a part of every global batch; see `SpanDeal`."""
        return True

    def rank_size(self, topology: Topology) -> int:
        """Return the number of samples of the rank's share."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        return self._batches(self.epoch_samples) * size


def batches_before(phases: Sequence[Phase]) -> int:
    """Return the number of global batches taken in earlier phases of an epoch.

    A global batch that was only begun does not count: it is read again.
    """
    # In a phase of global batches, `taken` has the number of samples that each worker of a rank has
    # taken. All ranks are in step, so one rank stands for all.
    return sum(taken // phase.partition.batch_size for phase in phases for taken in phase.taken)


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
