"""Division of a dataset among its readers, according to manifest, shuffle, evenness and topology. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, Self

from shardcache.errors import ConfigError
from shardcache_client.order.lanes.elastic import ElasticDeal, batch_size_of_rank
from shardcache_client.order.lanes.interleaving import Lane
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.mix import Mix
from shardcache_client.order.rounds import Order, Piece, Shuffle, round_key, shard_order
from shardcache_client.order.share import Segment, Share
from shardcache_client.order.span_deal import SpanDeal
from shardcache_client.position.partition import Even, Partition, Phase
from shardcache_client.topology import Topology


class Deal(Protocol):
    """A division of each epoch into the readers' shares."""

    @property
    def counted(self) -> bool:
        """True if samples are dealt, False if whole shards."""

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an epoch over all ranks, before any padding; None if they are not counted."""

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return a reader's share of an epoch, or a share of other readers, to make up for skipped samples.

        Args:
            time: 0 for its own share; 1, 2 and so on for the next ones.
            phases: earlier phases of the epoch, read by other readers.
        """

    def quota(self, topology: Topology, share: Share) -> int | None:
        """Return the number of samples that a reader must yield for its own share; None for all that can be read."""

    def rank_size(self, topology: Topology) -> int | None:
        """Return the number of samples that a rank reads in an epoch, None if unknown."""


@dataclass(frozen=True)
class SampleDeal(SpanDeal):
    """Deals the samples of one dataset.

    Attributes:
        counts: number of samples in each shard of the manifest.
        samples_per_epoch: length of an epoch; each begins where the previous one ended. None for the whole dataset.
    """

    counts: Sequence[int]
    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    @cached_property
    def _order(self) -> Order:
        return Order(self.counts, self.shuffle)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch; see `Deal`."""
        return self._order.samples if self.samples_per_epoch is None else self.samples_per_epoch

    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order in which the reader of a span of the epoch reads it."""
        begin = epoch * self.epoch_samples
        pieces = self._order.pieces(begin + span[0], begin + span[1])
        return Mix(pieces, self.shuffle.window if self.shuffle else 0)


@dataclass(frozen=True)
class ShardDeal:
    """Deals whole shards whose numbers of samples are not known yet.

    Attributes:
        shards: number of shards.
        samples_per_epoch: number of samples that all ranks yield together, rereading their shards if necessary. None to
            read each shard once.
    """

    shards: int
    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    counted: ClassVar[bool] = False
    epoch_samples: ClassVar[None] = None

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return a reader's shards of the epoch, in a different order each time; without counts, `phases` is empty."""
        key = round_key(self.shuffle, epoch, time)
        order = shard_order([1] * self.shards, self.shuffle, key)
        start, stop = Partition.of(topology, None, 1).own(self.shards, (topology.reader + time) % topology.readers)
        mine = order[start:stop]
        if not mine and self.samples_per_epoch is not None:
            mine = [order[topology.reader % self.shards]]  # fewer shards than readers: some read the same shard
        pieces = [Piece(shard, key) for shard in mine]
        return Share((Segment(Mix(pieces, self.shuffle.window if self.shuffle else 0)),) if pieces else (), None)

    def quota(self, topology: Topology, share: Share) -> int | None:
        """Return the reader's part of `samples_per_epoch`."""
        if self.samples_per_epoch is None:
            return None
        return Partition.of(topology, self.even, self.batch_size).size(self.samples_per_epoch, topology.reader)

    def rank_size(self, topology: Topology) -> int | None:
        """Return the rank's part of `samples_per_epoch`."""
        if self.samples_per_epoch is None:
            return None
        return Partition.of(topology, self.even, self.batch_size).rank_size(self.samples_per_epoch, topology.rank)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Options of a dataset for its deal; see `SampleDeal`, `ShardDeal` and `ElasticDeal`.

    Attributes:
        spans: number of spans of a global batch.
        unit: description of the samples, if they are not those of the tars: states of others do not fit.
    """

    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None
    global_batch_size: int | None = None
    spans: int = 1
    unit: str = ""

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return the same with other seeds, by source; that of a dataset alone is under ""."""
        return replace(self, shuffle=self.shuffle and replace(self.shuffle, seed=seeds[""]))

    def options(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks, by the names of a dataset's arguments."""
        return {
            "shuffle, shuffle_window, seed or canonical_nodes": self.shuffle,
            "even": self.even,
            "samples_per_epoch": self.samples_per_epoch,
            "global_batch_size": self.global_batch_size,
        }

    def batches(self) -> dict[str, object]:
        """Return the options in which ranks must not differ if they have them: ranks that train together would not end
        an epoch after the same number of batches.
        """
        return {"batch_size": self.batch_size} if self.even is not None and self.batch_size > 1 else {}

    @property
    def needs_counts(self) -> bool:
        """True if several ranks cannot be dealt anything until samples are counted; see `check`."""
        return self.global_batch_size is not None or (self.even is not None and self.samples_per_epoch is None)

    def batch_size_of(self, world_size: int) -> int:
        """Return the number of samples in a batch of each rank."""
        size = self.global_batch_size
        return self.batch_size if size is None else batch_size_of_rank(size, world_size)

    def deal(self, manifest: Manifest, *, counted: bool | None = None) -> Deal:
        """Return the deal for a manifest.

        Args:
            counted: True to deal samples, False to deal whole shards, None to deal samples if all are counted.

        Raises ConfigError if samples are to be dealt that are not counted, or if there are none.
        """
        options = (self.shuffle, self.even, self.batch_size, self.samples_per_epoch)
        if self.global_batch_size is not None and (counted is False or manifest.counts is None):
            raise ConfigError(
                f"global_batch_size needs the number of samples, and {manifest.uncounted} shards were never counted",
                remedy="count them once with `shardcache index URL... -o index.json`, and use index.json as the url",
            )
        if counted is False or (counted is None and manifest.counts is None):
            return ShardDeal(len(manifest), *options)
        if manifest.counts is None:
            raise ConfigError(
                f"cannot resume this epoch: the sample counts of {manifest.uncounted} shards are no longer known",
                remedy="count them: shardcache index URL... -o FILE",
            )
        if not manifest.samples:
            raise ConfigError("the shards contain no samples")
        return self._elastic(SampleDeal(manifest.counts, *options))

    def _elastic(self, deal: SpanDeal) -> SpanDeal:
        size = self.global_batch_size
        return deal if size is None else ElasticDeal(deal, size, self.spans)

    @property
    def _told(self) -> list[object]:
        unit: list[object] = [self.unit] if self.unit else []
        return unit if self.global_batch_size is None else [self.global_batch_size, self.spans, self.even, *unit]

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return identifiers, of 16 hexadecimal digits, that are equal for datasets with interchangeable states.

        One identifies states of dealt shards (False); another, if samples are counted, states of dealt samples (True).
        Of a selection, samples are always dealt.
        """
        told = [[shard.url for shard in manifest], repr(self.shuffle), self.samples_per_epoch, *self._told]
        if manifest.choices is not None:
            return {True: digest([*told, manifest.counts, manifest.selection])}
        found = {False: digest(told)}
        return found if manifest.counts is None else found | {True: digest([*told, manifest.counts])}


def digest(told: object) -> str:
    """Return 16 hexadecimal digits that identify a JSON value."""
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()


def check(deal: Deal, topology: Topology, even: Even) -> None:
    """Raise ConfigError if ranks should get the same number of samples but would not, or would get none at all."""
    if even is not None and topology.world_size > 1 and deal.rank_size(topology) is None:
        raise ConfigError(
            f"{topology.world_size} ranks cannot get the same number of samples: the shards' samples are not counted",
            remedy="count them once with `shardcache index URL... -o index.json`, and use index.json as the url; or "
            "set samples_per_epoch; or even=None if ranks may differ, as for inference",
        )
    if even == "drop" and deal.rank_size(topology) == 0:
        raise ConfigError(
            f"there are fewer samples than ranks ({topology.world_size}), so even='drop' drops all of them",
            remedy="use even='pad', or fewer ranks",
        )
