"""Who reads what in which order, by all that a dataset was told: manifest, shuffle, evenness, topology. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Protocol

from shardcache.errors import ConfigError
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.mix import Mix
from shardcache_client.order.partition import Cut, Even
from shardcache_client.order.progress import Phase, first_span, what_is_left
from shardcache_client.order.rounds import Order, Piece, Shuffle, round_key, shard_order
from shardcache_client.order.share import Leg, Share
from shardcache_client.topology import Topology

_what_is_left = lru_cache(maxsize=4)(what_is_left)


class Deal(Protocol):
    """Gives each reader its share of each epoch."""

    @property
    def counted(self) -> bool:
        """Whether samples are dealt, or whole shards."""

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an epoch, all ranks together and before any padding; None where they are not counted."""

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return what a reader reads in an epoch, or, should that not be enough, goes on with: what others read.

        Args:
            time: 0 for its own share, then 1, 2 and so on.
            phases: what other readers have read of the epoch before.
        """

    def quota(self, topology: Topology, share: Share) -> int | None:
        """Return how many samples a reader gives for a share that it has for the first time; None for all there are."""

    def rank_size(self, topology: Topology) -> int | None:
        """Return how many samples a rank reads in an epoch, None where that is not known."""


@dataclass(frozen=True)
class SampleDeal:
    """Deals samples: every reader gets a contiguous span of the epoch, and the spans are as equal as `even` says.

    Attributes:
        counts: samples of each shard of the manifest.
        samples_per_epoch: how far an epoch goes; it then goes on where the last one ended. None for one round.
    """

    counts: Sequence[int]
    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    counted: ClassVar[bool] = True

    @cached_property
    def _order(self) -> Order:
        return Order(self.counts, self.shuffle)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch; see `Deal`."""
        return self._order.samples if self.samples_per_epoch is None else self.samples_per_epoch

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[Phase] = ()) -> Share:
        """Return a reader's share; later, that of the reader so many further on."""
        cut = Cut.of(topology, self.even, self.batch_size)
        first = phases[0].cut if phases else cut
        rest = _what_is_left(self.epoch_samples, tuple(phases), cut)
        span = cut.span(len(rest), (topology.reader + time) % cut.readers)
        legs = tuple(
            Leg.between(self._mix(epoch, *first_span(self.epoch_samples, first, part.reader)), part.start, part.stop)
            for part in rest.between(*span)
        )
        return Share(legs, span[1] - span[0] if legs else 0)

    def _mix(self, epoch: int, start: int, stop: int) -> Mix:
        begin = epoch * self.epoch_samples
        return Mix(self._order.pieces(begin + start, begin + stop), self.shuffle.window if self.shuffle else 0)

    def quota(self, topology: Topology, share: Share) -> int | None:
        """Return the share's size: what is skipped has to be made up for, or ranks would no longer be equal."""
        return None if self.even is None else share.samples

    def ends_together(self, cut: Cut, phases: Sequence[Phase], *, drop_last: bool = False) -> bool:
        """Return whether all ranks make the same number of batches of the samples left after some phases."""
        left = len(_what_is_left(self.epoch_samples, tuple(phases), cut))
        return len({cut.batches(left, rank, drop_last=drop_last) for rank in range(cut.world_size)}) == 1

    def rank_size(self, topology: Topology) -> int | None:
        """Return the size of a rank's share."""
        return Cut.of(topology, self.even, self.batch_size).rank_size(self.epoch_samples, topology.rank)


@dataclass(frozen=True)
class ShardDeal:
    """Deals whole shards, of which nobody knows yet how many samples they hold.

    Attributes:
        shards: how many there are.
        samples_per_epoch: samples that all ranks give together; they read their shards as often as that takes. None to
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
        """Return a reader's shards of the epoch, in another order each time; `phases` cannot be, without counts."""
        key = round_key(self.shuffle, epoch, time)
        order = shard_order([1] * self.shards, self.shuffle, key)
        start, stop = Cut.of(topology, None, 1).span(self.shards, (topology.reader + time) % topology.readers)
        mine = order[start:stop]
        if not mine and self.samples_per_epoch is not None:
            mine = [order[topology.reader % self.shards]]  # fewer shards than readers: some read the same
        pieces = [Piece(shard, key) for shard in mine]
        return Share((Leg(Mix(pieces, self.shuffle.window if self.shuffle else 0)),) if pieces else (), None)

    def quota(self, topology: Topology, share: Share) -> int | None:
        """Return the reader's part of `samples_per_epoch`."""
        if self.samples_per_epoch is None:
            return None
        start, stop = Cut.of(topology, self.even, self.batch_size).span(self.samples_per_epoch, topology.reader)
        return stop - start

    def rank_size(self, topology: Topology) -> int | None:
        """Return the rank's part of `samples_per_epoch`."""
        if self.samples_per_epoch is None:
            return None
        return Cut.of(topology, self.even, self.batch_size).rank_size(self.samples_per_epoch, topology.rank)


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a dataset was told to deal; see `SampleDeal` and `ShardDeal`."""

    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    @property
    def needs_counts(self) -> bool:
        """True where several ranks can be dealt nothing as long as samples are not counted; see `check`."""
        return self.even is not None and self.samples_per_epoch is None

    def deal(self, manifest: Manifest, *, counted: bool | None = None) -> Deal:
        """Return how a manifest is dealt.

        Args:
            counted: whether by samples; None: where they are known. Raises ConfigError where they are not.
        """
        options = (self.shuffle, self.even, self.batch_size, self.samples_per_epoch)
        if counted is False or (counted is None and manifest.counts is None):
            return ShardDeal(len(manifest), *options)
        if manifest.counts is None:
            raise ConfigError(
                f"the epoch cannot be gone on with: the samples of {manifest.uncounted} shards are not known any more",
                remedy="count them: shardcache index URL... -o FILE",
            )
        if not manifest.samples:
            raise ConfigError("there is no sample in any of the shards")
        return SampleDeal(manifest.counts, *options)

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return what is the same for two datasets whose states mean the same: 16 hexadecimal digits.

        One for states of shards (False), another, where samples are counted, for states of samples (True).
        """
        told = [[shard.url for shard in manifest], repr(self.shuffle), self.samples_per_epoch]
        found = {False: _digest(told)}
        return found if manifest.counts is None else found | {True: _digest([*told, manifest.counts])}


def _digest(told: object) -> str:
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()


def check(deal: Deal, topology: Topology, even: Even) -> None:
    """Raise ConfigError where ranks would not get equally many samples, though they should, or get none at all."""
    if even is not None and topology.world_size > 1 and deal.rank_size(topology) is None:
        raise ConfigError(
            f"{topology.world_size} ranks cannot be given equally many samples: nobody has counted those of the shards",
            remedy="count them once, with `shardcache index URL... -o index.json`, and use index.json as the url; or "
            "give samples_per_epoch; or even=None where ranks may differ, as for inference",
        )
    if even == "drop" and deal.rank_size(topology) == 0:
        raise ConfigError(
            f"there are fewer samples than the {topology.world_size} ranks, and even='drop' leaves all of them out",
            remedy="use even='pad', or fewer ranks",
        )
