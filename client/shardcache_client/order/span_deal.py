"""The dealing of an epoch's samples in spans, for any dataset whose samples are counted. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from shardcache_client.order.lanes.interleaving import Lane, between
from shardcache_client.order.share import Share
from shardcache_client.position.partition import Even, Partition, Phase, what_is_left
from shardcache_client.topology import Topology

_what_is_left = lru_cache(maxsize=4)(what_is_left)


class SpanDeal(ABC):
    """Deals samples: every reader gets a contiguous span of the epoch, with sizes according to `even`."""

    even: Even
    batch_size: int

    counted: ClassVar[bool] = True

    @property
    @abstractmethod
    def epoch_samples(self) -> int:
        """Samples of an epoch; see `Deal`."""

    @abstractmethod
    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order in which the reader of a span of the epoch reads it."""

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return the share of this reader or, for `time` above 0, of the reader `time` places further on."""
        cut = Partition.of(topology, self.even, self.batch_size)
        first = phases[0].cut if phases else cut
        rest = _what_is_left(self.epoch_samples, tuple(phases), cut)
        reader = (topology.reader + time) % cut.readers
        segments = tuple(
            between(self.lane(epoch, first.own(self.epoch_samples, part.reader)), part.start, part.stop)
            for span in cut.spans(len(rest), reader)
            for part in rest.between(*span)
        )
        return Share(segments, cut.size(len(rest), reader))

    def quota(self, topology: Topology, share: Share) -> int | None:
        """Return the share's size: skipped samples must be replaced, or the ranks would get unequal numbers."""
        return None if self.even is None else share.samples

    def ends_together(self, cut: Partition, phases: Sequence[Phase], *, drop_last: bool = False) -> bool:
        """Return True if all ranks make the same number of batches of the samples left after the phases."""
        left = len(_what_is_left(self.epoch_samples, tuple(phases), cut))
        return len({cut.batches(left, rank, drop_last=drop_last) for rank in range(cut.world_size)}) == 1

    def rank_size(self, topology: Topology) -> int | None:
        """Return the number of samples of the rank's share."""
        return Partition.of(topology, self.even, self.batch_size).rank_size(self.epoch_samples, topology.rank)
