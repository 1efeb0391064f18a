"""A rank's batches of an epoch, or of the rest of one: their number, places and readers.

Every sample of the rank's epoch has a number, which is called its place. Batch n has the places
from n times the batch size on, counted from the place at which the epoch is resumed. Where samples
have no numbers, `rank_chunks` is used instead.

- A share is the samples of an epoch that a rank reads.
- A phase is a part of the epoch that the same ranks have read. If a run resumes with another number
  of ranks, these share what earlier phases have left.
- A substitute is a good sample that takes the place of a bad one. It may be any sample of the
  epoch, so a reader of single samples, the lone reader, reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import islice
from typing import Any

from shardcache_client.batches.maker import BadCounts, BatchMaker, ItemMaker, Skips, StoppedError
from shardcache_client.batches.rank_work import BatchForm, RankWork, Reading
from shardcache_client.batches.substitutes import Substitutes
from shardcache_client.batches.threads import Check, nothing_to_check
from shardcache_client.daemon.session import Session
from shardcache_client.handlers import for_epoch
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.reading.epochs.epoch_plans import MAX_VISITS, EpochPlans, PlacesReader
from shardcache_client.reading.epochs.lone_reader import (
    LoneRangeReader,
    LoneShardReader,
    SampleReader,
)
from shardcache_client.reading.epochs.scattered_reader import reader_of


class RankBatches(RankWork):
    """The batches that a rank reads of an epoch, or of the rest of one.

    Args:
        reading: means of reading the dataset.
        progress: progress of all ranks in the epoch so far.
        topology: the rank.
        form: form of the batches.
        is_read: True if nothing is left of the epoch. The progress may show that some is left, if
            a handler (`on_error`) has ended the epoch early.
    """

    def __init__(
        self,
        reading: Reading,
        progress: Progress,
        topology: Topology,
        form: BatchForm,
        *,
        is_read: bool = False,
    ) -> None:
        super().__init__(reading)
        deal = reading.deal
        assert isinstance(deal, SpanDeal)
        start = progress.start_of(deal, topology)
        share = deal.share(progress.epoch, topology, phases=start.phases)
        self.progress = progress
        self._deal = deal
        self._topology = topology
        self._form = form
        self._passed = start.passed  # number of places of the share that were passed before
        self._order = RankEpoch(share, reading.form.manifest)
        if is_read:
            self._passed = len(self._order)

    def __repr__(self) -> str:
        return f"RankBatches({self.progress!r}, batches={len(self)})"

    @property
    def samples(self) -> int:
        """Number of samples in all batches, including a last short batch."""
        return max(0, len(self._order) - self._passed)

    @cached_property
    def count(self) -> int:
        """Number of batches. It may be too large for `len`."""
        size = self._form.places_per_batch
        if self._form.drop_last:
            return self.samples // size
        return -(-self.samples // size)  # rounded up

    def __len__(self) -> int:
        return self.count

    def after(self, batches: int) -> Progress:
        """Return the progress once each rank has taken this number of further batches."""
        return self.progress.after(self._topology.world_size, self._form.places_per_batch, batches)

    def places_of(self, number: int) -> tuple[int, int]:
        """Return the first place of a batch, and the place after its last."""
        first = self._passed + number * self._form.places_per_batch
        return first, min(first + self._form.places_per_batch, len(self._order))

    @contextmanager
    def open_maker(self, skips: Skips) -> Iterator[BatchMaker]:
        """Lend a maker of batches; see `RankWork`."""
        with closing(self._open_lone_reader()) as lone_reader:
            item_maker = self._item_maker(skips, lone_reader)
            yield BatchMaker(item_maker, self._form.collate, self._form.size)

    def _item_maker(self, skips: Skips, lone_reader: SampleReader) -> ItemMaker:
        """Return a maker of items, which reads substitutes with `lone_reader`."""
        reading = self._reading
        epoch = self.progress.epoch
        substitutes = None
        # With `even=None`, ranks may have different numbers of items: bad samples are left out.
        if self._deal.even is not None:
            spare_of = partial(self._deal.spare, epoch, self._topology)
            substitutes = Substitutes(spare_of, reading.form.manifest, lone_reader)
        return ItemMaker(
            reading.pipeline,
            skips,
            substitutes=substitutes,
            rank=self._topology.rank,
            epoch=epoch,
        )

    def _open_lone_reader(self) -> SampleReader:
        """Return a reader of single samples; the caller must close it."""
        reading = self._reading
        # With a global shuffle, samples are read by their ranges of bytes, not from whole shards.
        if reading.form.scattered is not None:
            return LoneRangeReader(reading.form, reading.pipeline, reading.sessions)
        return LoneShardReader(reading.sessions.open, reading.form)

    def open_places_reader(
        self, session: Session, check: Check = nothing_to_check, *, is_shared: bool = False
    ) -> PlacesReader:
        """Return a reader of the samples at this epoch's places; see `RankWork`."""
        reading = self._reading
        epoch = self.progress.epoch
        # Finding the next epoch's first shards takes a while. So plans get a function, which they
        # call only once they need these shards.
        shards_after: Callable[[], Iterator[int]] = no_shards
        if reading.has_epoch_after(epoch):
            manifest = reading.form.manifest
            shards_after = partial(first_shards, self._deal, epoch + 1, self._topology, manifest)
        plans = EpochPlans(session, reading.form, epoch, shards_after, check, is_shared=is_shared)
        return reader_of(session, plans, self._order, reading.sessions, check, self._next_order)

    def _next_order(self) -> RankEpoch | None:
        """Return the rank's order of the next epoch; None if there is none."""
        epoch = self.progress.epoch + 1
        if not self._reading.has_epoch_after(self.progress.epoch):
            return None
        return RankEpoch(self._deal.share(epoch, self._topology), self._reading.form.manifest)

    def place_of_sample(self, sample: int) -> int:
        """Return the place of a sample, given its number from where the epoch is resumed."""
        return self._passed + sample

    def after_samples(self, samples: int, batch_size: int) -> Progress:
        """Return the progress once each rank has passed `samples` further places.

        The progress counts batches of `batch_size` samples; or batches of one sample, if `samples`
        is not a multiple of `batch_size`.
        """
        return self.progress.after_samples(self._topology.world_size, batch_size, samples)

    def items(
        self, runs: Iterable[tuple[int, int]], bad: BadCounts, *, is_shared: bool = False
    ) -> Generator[Any]:
        """Yield the items of some places, one by one.

        Args:
            runs: runs of places, ascending: the first place of each, and the place after its last.
            bad: counts the bad places.
            is_shared: True if other processes read other places of this epoch.
        """
        reading = self._reading
        with (
            closing(self._open_lone_reader()) as lone_reader,
            reading.sessions.borrow() as session,
            closing(self.open_places_reader(session, is_shared=is_shared)) as places_reader,
        ):
            skips = Skips(for_epoch(reading.on_error))  # `for_epoch` limits its warnings
            maker = self._item_maker(skips, lone_reader)
            try:
                for first, end in runs:
                    yield from maker.items(first, places_reader.reads(first, end), bad)
            except StoppedError:
                pass  # The handler, `on_error`, has ended the epoch.


def no_shards() -> Iterator[int]:
    """Yield no shards."""
    return iter(())


def first_shards(
    deal: SpanDeal, epoch: int, topology: Topology, manifest: Manifest
) -> Iterator[int]:
    """Yield the numbers of the first shards that a rank needs in an epoch.

    There are at most as many as a plan may have. Plans are sent to the daemon, which fetches the
    shards ahead.

    Args:
        deal: division of the epoch.
        epoch: number of the epoch.
        topology: the rank.
        manifest: the shards of the dataset.
    """
    share = deal.share(epoch, topology)
    visits = RankEpoch(share, manifest).visits()
    return (visit.shard for visit in islice(visits, MAX_VISITS))
