"""Division of a dataset among its readers, according to manifest, shuffle, evenness and topology. Pure.

Global batches are the same for any number of ranks and workers: the epoch is cut into a fixed number of spans, each
with an order of its own, and a global batch is the next few samples of each span, one span after another, however many
ranks there are. Each rank takes an equal part of every global batch, in order, and its workers take these parts in
turn, as a DataLoader asks them for batches. So a reader reads some places of each span that it needs, at regular
distances. Progress is a single number, that of the global batches taken.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Self, TypeAlias

from shardcache.errors import ConfigError
from shardcache_client.order import rounds
from shardcache_client.order.lanes import Blocks, Interleaved, Lane, Mix, Segment, Share, Strided
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.rounds import Topology

_what_is_left = lru_cache(maxsize=4)(rounds.what_is_left)


class SpanDeal(ABC):
    """Deals samples: every reader gets a contiguous span of the epoch, with sizes according to `even`."""

    even: rounds.Even
    batch_size: int

    counted: ClassVar[bool] = True

    @property
    @abstractmethod
    def epoch_samples(self) -> int:
        """Samples of an epoch over all ranks, before any padding."""

    def pass_places(self, epoch: int) -> int | None:
        """Return the number of consecutive places of a reader that hold every sample; None if it is unknown."""
        return None

    @abstractmethod
    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order in which the reader of a span of the epoch reads it."""

    def cut(self, topology: Topology) -> rounds.Partition:
        """Return the division of the epoch among the readers of a job."""
        return rounds.Partition(topology.world_size, topology.workers, self.even, self.batch_size)

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[rounds.Phase] = ()) -> Share:
        """Return a reader's share of the rest of an epoch after some phases, or one that makes up for skipped samples.

        `time` is 0 for its own share; 1, 2 and so on for the shares of the readers so many places further on.
        """
        cut = self.cut(topology)
        first = phases[0].cut if phases else cut
        rest = _what_is_left(self.epoch_samples, tuple(phases), cut)
        reader = (topology.reader + time) % cut.readers
        segments = tuple(
            self.lane(epoch, first.own(self.epoch_samples, owner)).between(start, stop)
            for span in cut.spans(len(rest), reader)
            for owner, start, stop in rest.between(*span)
        )
        return Share(segments, cut.size(len(rest), reader))

    def ends_together(self, cut: rounds.Partition, phases: Sequence[rounds.Phase], *, drop_last: bool = False) -> bool:
        """Return True if all ranks make the same number of batches of the samples left after the phases."""
        left = len(_what_is_left(self.epoch_samples, tuple(phases), cut))
        return len({cut.batches(left, rank, drop_last=drop_last) for rank in range(cut.world_size)}) == 1

    def sources_of(self, epoch: int) -> dict[str, dict[str, int]]:
        """Return the "start" of an epoch in each source of a mixture, and its number of "samples", by name."""
        return {}

    def rank_size(self, topology: Topology) -> int | None:
        """Return the number of samples that a rank reads in an epoch."""
        return self.cut(topology).rank_size(self.epoch_samples, topology.rank)


@dataclass(frozen=True)
class SampleDeal(SpanDeal):
    """Deals the samples of one dataset: all of it, or the next `samples_per_epoch` in each epoch."""

    counts: Sequence[int]
    shuffle: rounds.Shuffle | None = None
    even: rounds.Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    @cached_property
    def _order(self) -> rounds.Order:
        return rounds.Order(self.counts, self.shuffle)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self._order.samples if self.samples_per_epoch is None else self.samples_per_epoch

    def pass_places(self, epoch: int) -> int:
        """Return the number of consecutive places that hold a whole round, wherever they begin."""
        return 2 * self._order.samples

    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order in which the reader of a span of the epoch reads it."""
        begin = epoch * self.epoch_samples
        pieces = self._order.pieces(begin + span[0], begin + span[1])
        return Mix(pieces, self.shuffle.window if self.shuffle else 0)


@dataclass(frozen=True)
class ElasticDeal(SpanDeal):
    """Deals global batches of samples, with equal parts of `count` spans.

    An epoch is whole global batches: with `even="pad"` the last one is filled with samples that come next in the order,
    with "drop" it is left out unless it is whole.
    """

    spans: SpanDeal
    global_batch_size: int
    count: int = 1

    @property
    def even(self) -> rounds.Even:  # type: ignore[override]  # read only
        """Policy for a number of samples that is not whole global batches."""
        return self.spans.even

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self.spans.epoch_samples

    @property
    def batches(self) -> int:
        """Number of global batches in an epoch."""
        samples, size = self.epoch_samples, self.global_batch_size
        return samples // size if self.even == "drop" else -(-samples // size)

    def cut(self, topology: Topology) -> rounds.Partition:
        """Return the division of the epoch; each rank has its part of a global batch."""
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        return rounds.Partition(topology.world_size, topology.workers, self.even, size)

    def lane(self, epoch: int, span: tuple[int, int]) -> Lane:
        """Return the order of a span of the epoch, which may reach beyond its end."""
        return self.spans.lane(epoch, span)

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[rounds.Phase] = ()) -> Share:
        """Return the parts of global batches for this reader or, for `time` above 0, one `time` places further on."""
        rank, worker = divmod((topology.reader + time) % topology.readers, topology.workers)
        size = batch_size_of_rank(self.global_batch_size, topology.world_size)
        piece = self.global_batch_size // self.count
        first = batches_before(phases) + worker
        batches = max(0, -((first - self.batches) // topology.workers))
        if not batches:
            return Share((), 0)
        lanes, length = [], self.batches * piece
        for span in range(rank * size // piece, -(-(rank + 1) * size // piece)):
            start, stop = max(0, rank * size - span * piece), min(piece, (rank + 1) * size - span * piece)
            lane = self.lane(epoch, (span * length, (span + 1) * length))
            width = stop - start
            lanes.append(Strided(0, batches * width, lane, first * piece + start, width, topology.workers * piece))
        turns = Blocks(tuple(lane.width for lane in lanes))
        return Share((Interleaved(0, batches * size, turns, tuple(lanes)),), batches * size)

    def sources_of(self, epoch: int) -> dict[str, dict[str, int]]:
        """Return those of its spans; the number of global batches is the position in all of them."""
        return self.spans.sources_of(epoch)

    def ends_together(self, cut: rounds.Partition, phases: Sequence[rounds.Phase], *, drop_last: bool = False) -> bool:
        """Return True: all ranks have a part of every global batch."""
        return True

    def rank_size(self, topology: Topology) -> int:
        """Return the number of samples of the rank's share."""
        return self.batches * batch_size_of_rank(self.global_batch_size, topology.world_size)


def batches_before(phases: Sequence[rounds.Phase]) -> int:
    """Return the number of global batches taken in earlier phases of an epoch; one that was begun is read again."""
    # A phase has the number of samples taken by each worker of a rank, all of whom are in step.
    return sum(taken // phase.cut.batch_size for phase in phases for taken in phase.taken)


def batch_size_of_rank(global_batch_size: int, world_size: int) -> int:
    """Return the size of each rank's part of a global batch. Raises ConfigError if the parts would not be equal."""
    if global_batch_size % world_size:
        raise ConfigError(
            f"global_batch_size={global_batch_size} cannot be divided among {world_size} ranks",
            remedy="use a number of ranks that divides it",
        )
    return global_batch_size // world_size


@dataclass(frozen=True)
class ShardDeal:
    """Deals whole shards whose numbers of samples are not known yet.

    Each is read once; with `samples_per_epoch`, as often as it takes for all ranks together to yield that many.
    """

    shards: int
    shuffle: rounds.Shuffle | None = None
    even: rounds.Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None

    counted: ClassVar[bool] = False
    epoch_samples: ClassVar[None] = None

    def cut(self, topology: Topology) -> rounds.Partition:
        """Return the division of `samples_per_epoch`."""
        return rounds.Partition(topology.world_size, topology.workers, self.even, self.batch_size)

    def share(self, epoch: int, time: int, topology: Topology, phases: Sequence[rounds.Phase] = ()) -> Share:
        """Return a reader's shards of the epoch, in a different order each time; without counts, `phases` is empty."""
        key = rounds.round_key(self.shuffle, epoch, time)
        order = rounds.shard_order([1] * self.shards, self.shuffle, key)
        reader = (topology.reader + time) % topology.readers
        start, stop = rounds.Partition(topology.world_size, topology.workers, None).own(self.shards, reader)
        mine = order[start:stop]
        if not mine and self.samples_per_epoch is not None:
            mine = [order[topology.reader % self.shards]]  # fewer shards than readers: some read the same shard
        pieces = rounds.ListedPieces(rounds.Piece(shard, key) for shard in mine)
        mix = Mix(pieces, self.shuffle.window if self.shuffle else 0)
        return Share((Segment(mix),) if mine else (), None)

    def pass_places(self, epoch: int) -> None:
        """Return None: samples are not counted, and the shares of all readers together are one pass."""

    def rank_size(self, topology: Topology) -> int | None:
        """Return the rank's part of `samples_per_epoch`."""
        cut, samples = self.cut(topology), self.samples_per_epoch
        return None if samples is None else cut.rank_size(samples, topology.rank)

    def ends_together(self, cut: rounds.Partition, phases: Sequence[rounds.Phase], *, drop_last: bool = False) -> bool:
        """Return False: nobody knows when ranks end."""
        return False


Deal: TypeAlias = SpanDeal | ShardDeal
"""A division of each epoch into the readers' shares."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Options of a dataset for its deal; `unit` describes samples that are not those of the tars."""

    shuffle: rounds.Shuffle | None = None
    even: rounds.Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None
    global_batch_size: int | None = None
    spans: int = 1
    unit: str = ""

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return the same with other seeds, by source; that of a dataset alone is under ""."""
        return replace(self, shuffle=self.shuffle and replace(self.shuffle, seed=seeds.get("", self.shuffle.seed)))

    def options(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks, by the names of a dataset's arguments."""
        return {
            "shuffle, shuffle_window, seed or canonical_nodes": self.shuffle,
            "even": self.even,
            "samples_per_epoch": self.samples_per_epoch,
            "global_batch_size": self.global_batch_size,
        }

    def batches(self) -> dict[str, object]:
        """Return the options with which ranks that train together end an epoch after the same number of batches."""
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
        """Return the deal of samples; of whole shards if `counted` is False or samples are not. Raises ConfigError."""
        options = (self.shuffle, self.even, self.batch_size, self.samples_per_epoch)
        if self.global_batch_size is not None and (counted is False or manifest.counts is None):
            raise manifest.uncounted_error("global_batch_size needs the number of samples")
        if counted is False or (counted is None and manifest.counts is None):
            return ShardDeal(len(manifest), *options)
        if manifest.counts is None:
            raise ConfigError(
                f"cannot resume this epoch: the sample counts of {manifest.uncounted} shards are no longer known",
                remedy="count them: shardcache index URL... -o FILE",
            )
        if not manifest.samples:
            raise ConfigError("the shards contain no samples")
        return self._in_global_batches(SampleDeal(manifest.counts, *options))

    def _in_global_batches(self, deal: SpanDeal) -> SpanDeal:
        size = self.global_batch_size
        return deal if size is None else ElasticDeal(deal, size, self.spans)

    @property
    def _identity(self) -> list[object]:
        elastic = [] if self.global_batch_size is None else [self.global_batch_size, self.spans, self.even]
        return [*elastic, *([self.unit] if self.unit else [])]

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return identifiers, of 16 hexadecimal digits, that are equal for datasets with interchangeable states.

        One identifies states of dealt shards (False); another, if samples are counted, states of dealt samples (True).
        Of a selection, samples are always dealt.
        """
        facts = [manifest.shards.urls.fingerprint, repr(self.shuffle), self.samples_per_epoch, *self._identity]
        if manifest.choices is not None:
            return {True: digest([*facts, manifest.counts, manifest.selection])}
        found = {False: digest(facts)}
        return found if manifest.counts is None else found | {True: digest([*facts, manifest.counts])}


def digest(facts: object) -> str:
    """Return 16 hexadecimal digits that identify a JSON value."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def check(deal: Deal, topology: Topology, even: rounds.Even) -> None:
    """Raise ConfigError if ranks should get the same number of samples but would not, or would get none at all."""
    if even is not None and topology.world_size > 1 and deal.rank_size(topology) is None:
        raise ConfigError(
            f"{topology.world_size} ranks cannot get the same number of samples: the shards' samples are not counted",
            remedy="count them once with `shardcache index URL... -o index.json`, and use index.json as the url; or "
            "set samples_per_epoch; or even=None if ranks may differ, as for inference",
        )
    if even != "drop" or deal.rank_size(topology) != 0:
        return
    if isinstance(deal, ElasticDeal):
        raise ConfigError(
            f"global_batch_size={deal.global_batch_size} is larger than an epoch of {deal.epoch_samples} samples, "
            "so even='drop' drops all of them",
            remedy="use even='pad', or a smaller global_batch_size",
        )
    raise ConfigError(
        f"there are fewer samples than ranks ({topology.world_size}), so even='drop' drops all of them",
        remedy="use even='pad', or fewer ranks",
    )
