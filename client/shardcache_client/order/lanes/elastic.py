"""Global batches that are the same for any number of ranks and workers. Pure.

The epoch is cut into a fixed number of spans, each with an order of its own. A global batch is the next few samples of
each span, one span after another, however many ranks there are. Each rank takes an equal part of every global batch, in
order, and its workers take these parts in turn, as a DataLoader asks them for batches. So a reader reads some places of
each span that it needs, at regular distances: a *comb*.

Progress is a single number, that of the global batches taken, and any other readers continue from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardcache.errors import ConfigError
from shardcache_client.order.lanes.interleaving import Interleaving, Lane, between
from shardcache_client.order.share import Part, Share, Slice
from shardcache_client.order.span_deal import SpanDeal
from shardcache_client.position.partition import Even, Partition, Phase
from shardcache_client.position.state import batches_before
from shardcache_client.topology import Topology


@dataclass(frozen=True, slots=True)
class Comb:
    """Some places of a lane at regular distances: `width` places from `first` on, and again after each `period`."""

    lane: Lane
    first: int
    width: int
    period: int

    def between(self, start: int, stop: int) -> Combed:
        """Return the part from one of these places, counted from 0, to a later one."""
        return Combed(start, stop, self)

    def place(self, number: int) -> int:
        """Return the place in the lane of the comb's place of this number."""
        turn, nth = divmod(number, self.width)
        return self.first + turn * self.period + nth

    def before(self, place: int) -> int:
        """Return the number of the comb's places before a place of the lane."""
        turn, nth = divmod(max(0, place - self.first), self.period)
        return turn * self.width + min(nth, self.width)


@dataclass(frozen=True, slots=True)
class Combed(Slice):
    """A part of a comb: samples that do not follow each other in their lane."""

    whole: Comb

    @property
    def mixed(self) -> bool:
        """True: samples are read by number, from whole shards."""
        return True

    def passing(self) -> Part:
        """Return all samples of the lane from the first of these to the last."""
        return between(self.whole.lane, self.whole.place(self.start), self.whole.place(self.stop - 1) + 1)

    def places(self) -> Iterator[int]:
        """Yield the place of each sample in `passing`."""
        first = self.whole.place(self.start)
        return (self.whole.place(number) - first for number in range(self.start, self.stop))

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each shard with the number of samples before the first that needs it: (samples, shard), in order."""
        first = self.whole.place(self.start)
        for passed, shard in self.passing().entries():
            yield self.whole.before(first + passed) - self.start, shard


@dataclass(frozen=True, slots=True)
class Blocks:
    """Turns of lanes that take several places at a time, always the same number.

    Attributes:
        widths: number of places that each lane takes at a time, at least 1.
    """

    widths: tuple[int, ...]

    def lane(self, place: int) -> int:
        """Return the lane that a place belongs to."""
        nth = place % sum(self.widths)
        return next(lane for lane, end in enumerate(accumulate(self.widths)) if nth < end)

    def before(self, place: int) -> Sequence[int]:
        """Return the number of each lane's places before a place."""
        turn, nth = divmod(place, sum(self.widths))
        starts = accumulate(self.widths[:-1], initial=0)
        each = zip(starts, self.widths, strict=True)
        return [turn * width + min(max(0, nth - start), width) for start, width in each]

    def place(self, lane: int, number: int) -> int:
        """Return the place at which a lane has its turn of this number, counted from 0."""
        turn, nth = divmod(number, self.widths[lane])
        return turn * sum(self.widths) + sum(self.widths[:lane]) + nth


@dataclass(frozen=True)
class ElasticDeal(SpanDeal):
    """Deals global batches of samples.

    An epoch is whole global batches: with `even="pad"` the last one is filled with samples that come next in the order,
    with "drop" it is left out unless it is whole.

    Attributes:
        spans: deals the spans of the epoch.
        global_batch_size: number of samples in the batches of all ranks together; a multiple of `count`.
        count: number of spans.
    """

    spans: SpanDeal
    global_batch_size: int
    count: int = 1

    @property
    def even(self) -> Even:  # type: ignore[override]  # read only
        """Policy for a number of samples that is not whole global batches."""
        return self.spans.even

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch; see `Deal`."""
        return self.spans.epoch_samples

    @property
    def batches(self) -> int:
        """Number of global batches in an epoch."""
        samples, size = self.epoch_samples, self.global_batch_size
        return samples // size if self.even == "drop" else -(-samples // size)

    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order of a span of the epoch, which may reach beyond its end."""
        return self.spans.lane(epoch, span)

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return the parts of global batches for this reader or, for `time` above 0, one `time` places further on."""
        rank, worker = divmod((topology.reader + time) % topology.readers, topology.workers)
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        piece = self.global_batch_size // self.count
        first = batches_before(phases) + worker
        batches = max(0, -((first - self.batches) // topology.workers))
        if not batches:
            return Share((), 0)
        combs, length = [], self.batches * piece
        for span in range(rank * size // piece, -(-(rank + 1) * size // piece)):
            start, stop = max(0, rank * size - span * piece), min(piece, (rank + 1) * size - span * piece)
            lane = self.lane(epoch, (span * length, (span + 1) * length))
            combs.append(Comb(lane, first * piece + start, stop - start, topology.workers * piece))
        interleaving = Interleaving(Blocks(tuple(comb.width for comb in combs)), tuple(combs))
        return Share((interleaving.between(0, batches * size),), batches * size)

    def ends_together(self, cut: Partition, phases: Sequence[Phase], *, drop_last: bool = False) -> bool:
        """Return True: all ranks have a part of every global batch."""
        return True

    def rank_size(self, topology: Topology) -> int:
        """Return the number of samples of the rank's share."""
        return self.batches * batch_size_of_rank(self.global_batch_size, topology.world_size)


def batch_size_of_rank(global_batch_size: int, world_size: int) -> int:
    """Return the size of each rank's part of a global batch. Raises ConfigError if the parts would not be equal."""
    if global_batch_size % world_size:
        raise ConfigError(
            f"global_batch_size={global_batch_size} cannot be divided among {world_size} ranks",
            remedy="use a number of ranks that divides it",
        )
    return global_batch_size // world_size
