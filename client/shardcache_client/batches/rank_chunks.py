"""A reader's epoch in chunks: runs of its places, of whose samples some may be left out. Stages regroup what is left.

How many samples a chunk gives is known once it is made. So it is the chunks that have numbers, and that workers make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cached_property, partial
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

from shardcache_client.batches.maker import Bad, ItemMaker, MadeBatch, RawBatch, Skips, StoppedError, unreadable
from shardcache_client.batches.rank_batches import first_shards, nothing
from shardcache_client.batches.rank_work import Places, RankWork, Reading, nothing_to_check
from shardcache_client.daemon.session import Session
from shardcache_client.handlers import for_epoch
from shardcache_client.order.deal import ShardDeal, SpanDeal
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.rounds import Topology
from shardcache_client.order.uncounted import StepPlace, UncountedEpoch
from shardcache_client.position.staged_state import Resume
from shardcache_client.reading.epoch_times import Made
from shardcache_client.reading.place_reader import PLANNED, LoneReader, PlaceReader, Read
from shardcache_client.reading.uncounted_reader import UncountedReader
from shardcache_client.stages.stage import Placed

# More than any epoch has places, whose number nobody knows.
_ENDLESS = 1 << 62


class Chunk(NamedTuple):
    """What is left of a run of places.

    Attributes:
        items: with their places.
        end: the place after the last.
        steps: of uncounted shards, from the one that has the first place on.
        first_error: the first error that a handler has skipped so far; "" if there is none.
    """

    items: list[Placed]
    end: int
    steps: tuple[StepPlace, ...] = ()
    first_error: str = ""


class Spot(NamedTuple):
    """A place, and the number of the share of uncounted shards that it is in."""

    place: int
    share: int = 0


class RankChunks(RankWork):
    """The chunks of one reader's epoch, or of its rest.

    Args:
        reading: of the dataset.
        resume: from where.
        reader: the rank, or its worker in a plain DataLoader, as a rank of its own.
        size: number of places of a chunk.

    Attributes:
        places: number of places in the epoch; None if it is not known.
    """

    def __init__(self, reading: Reading, resume: Resume, reader: Topology, size: int) -> None:
        super().__init__(reading)
        self._resume = resume
        self._reader = reader
        self._size = size
        self._start = resume.reached.mark.place
        self._epoch = resume.progress.epoch
        self.places = None if self._counted is None else len(self._counted)

    def __repr__(self) -> str:
        return f"RankChunks({self._resume!r}, {self._reader})"

    @cached_property
    def _counted(self) -> RankEpoch | None:
        deal = self._reading.deal
        if isinstance(deal, ShardDeal):
            return None
        phases = self._resume.progress.past(deal.even)
        return RankEpoch(deal.share(self._epoch, 0, self._reader, phases), self._reading.form.manifest)

    @cached_property
    def _uncounted(self) -> UncountedEpoch:
        deal = self._reading.deal
        assert isinstance(deal, ShardDeal)
        return UncountedEpoch(deal, self._reader, self._epoch)

    @property
    def count(self) -> int:
        """Number of chunks; see `RankWork`."""
        if self.places is None:
            return _ENDLESS
        return -(-max(0, self.places - self._start) // self._size)

    def places_of(self, number: int) -> tuple[int, int]:
        """Return the first place of a chunk, and the one after its last."""
        first = self._start + number * self._size
        end = first + self._size
        return first, end if self.places is None else min(end, self.places)

    def place_reader(
        self, session: Session, check: Callable[[], None] = lambda: None, *, is_shared: bool = False
    ) -> Places:
        """Return a reader of the places of this epoch, to be closed."""
        return self._place_reader(session, check, deque(), is_shared=is_shared)

    def _place_reader(
        self, session: Session, check: Callable[[], None], begun: deque[StepPlace], *, is_shared: bool
    ) -> Places:
        form = self._reading.form
        if self._counted is not None:
            following = self._following_of_counted()
            return PlaceReader(session, form, self._counted, self._epoch, following, check, is_shared=is_shared)
        start = self._resume.reached.step
        following = self._following_of_uncounted()
        return UncountedReader(
            session, form, self._uncounted, self._epoch, start, following, check, begun, is_shared=is_shared
        )

    def _following_of_counted(self) -> Callable[[], Iterator[int]]:
        deal = self._reading.deal
        if not self._reading.has_epoch_after(self._epoch):
            return nothing
        assert isinstance(deal, SpanDeal)
        return partial(first_shards, deal, self._epoch + 1, self._reader, self._reading.form.manifest)

    def _following_of_uncounted(self) -> Callable[[], Iterator[int]]:
        deal = self._reading.deal
        if not self._reading.has_epoch_after(self._epoch):
            return nothing
        assert isinstance(deal, ShardDeal)
        return partial(_first_uncounted, UncountedEpoch(deal, self._reader, self._epoch + 1))

    def lone_reader(self) -> LoneReader:
        """Return a reader of single places, which is not used: samples are left out, and not replaced."""
        reading = self._reading
        return LoneReader(partial(reading.sessions.open, reading.identity), reading.form)

    def item_maker(self, skips: Skips, lone: LoneReader) -> ItemMaker:
        """Return what makes an item of what is read at its place."""
        return ItemMaker(self._reading.pipeline, skips, None, self._reader.rank, self._epoch)

    def maker(self, skips: Skips, lone: LoneReader) -> ChunkMaker:
        """Return what makes a chunk of what is read at its places."""
        return ChunkMaker(self.item_maker(skips, lone))

    def raw(self, number: int, places: Any, session: Session) -> RawBatch:
        """Return what a chunk is made of."""
        raw = super().raw(number, places, session)
        if not isinstance(places, UncountedReader):
            return raw
        first, end = self.places_of(number)
        return raw._replace(steps=places.steps(first), is_last=len(raw.reads) < end - first)

    @cached_property
    def _pass_places(self) -> int | None:
        """Number of consecutive places that hold every sample; None if it is unknown."""
        deal = self._reading.deal
        return deal.pass_places(self._epoch) if isinstance(deal, SpanDeal) else None

    def check_progress(self, last: Spot, now: Spot, first_error: str) -> None:
        """Raise ShardError if all samples have come since the last good one.

        Args:
            last: where the last item was.
            now: what is being read.
            first_error: the first that a handler has skipped; "" if there is none.
        """
        if self.places is None:
            is_barren = now.share - last.share > self._uncounted.shares
        else:
            is_barren = self._pass_places is not None and now.place - last.place >= self._pass_places
        if is_barren:
            tried = now.place - last.place
            is_filtered = self._reading.pipeline.filters
            raise unreadable(self._reader.rank, self._epoch, tried, first_error, is_filtered=is_filtered)

    def placed(self, bad: Bad, begun: deque[StepPlace]) -> Generator[Placed]:
        """Yield the items one by one, each as soon as it is read.

        Args:
            bad: gets what is left out.
            begun: gets the steps of uncounted shards.

        Raises the errors of reading and decoding that the handler does not skip, and ShardError if there has been no
        good sample while all have come.
        """
        reading = self._reading
        skips = Skips(for_epoch(reading.on_error))
        last = Spot(self._start, self._resume.reached.step.share)

        def watched(reads: Iterator[Read]) -> Iterator[Read]:
            for place, read in enumerate(reads, self._start):
                if place > last.place + 1:  # else the sample before this one was good
                    self.check_progress(last, Spot(place, _share(begun)), skips.first)
                yield read

        end = self._start + _ENDLESS if self.places is None else self.places
        with (
            reading.sessions.borrow(reading.identity) as session,
            closing(self._place_reader(session, nothing_to_check, begun, is_shared=False)) as places,
            closing(self.lone_reader()) as lone,
        ):
            maker = self.item_maker(skips, lone)
            reads = watched(places.reads(self._start, end))
            try:
                for number, item in enumerate(maker.items(self._start, reads, bad), self._start):
                    last = Spot(number + bad.places, _share(begun))
                    yield Placed(last.place, item)
            except StoppedError:
                pass


class ChunkMaker:
    """Makes the chunks of one epoch. Any thread."""

    def __init__(self, items: ItemMaker) -> None:
        self._items = items

    def make(self, raw: RawBatch) -> MadeBatch:
        """Return a chunk. Raises what `ItemMaker.items` raises."""
        begun_s = monotonic()
        items: list[Placed] = []
        bad = Bad()
        is_last = raw.is_last
        try:
            for item in self._items.items(raw.first, raw.reads, bad):
                items.append(Placed(raw.first + len(items) + bad.places, item))
        except StoppedError:
            is_last = True
        ended_s = monotonic()
        times = Made(
            samples=len(items),
            begun_s=begun_s - raw.reading_s,
            ended_s=ended_s,
            waited_s=raw.waited_s,
            decoding_s=ended_s - begun_s,
            collating_s=0.0,
        )
        chunk = Chunk(items, raw.first + len(raw.reads), raw.steps, self._items.skips.first)
        return MadeBatch(chunk, len(items), is_last, bad.samples, frozenset(bad.lost), times)


def _share(begun: deque[StepPlace]) -> int:
    return begun[-1].share if begun else 0


def _first_uncounted(epoch: UncountedEpoch) -> Iterator[int]:
    return islice(epoch.shards(StepPlace()), PLANNED)
