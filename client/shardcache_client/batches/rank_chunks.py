"""A reader's epoch in chunks: runs of its places, some of whose samples may be left out.

Chunks are used where it is not known in advance which places a batch takes: samples are filtered,
uncounted, or regrouped by a stage. A chunk has a fixed number of places, but how many of their
samples remain is known only once it is made. So chunks are numbered, and not batches: worker
processes make the chunks by their numbers, and then the stage makes batches of their samples.

- A reader is a rank, or one of its workers in a plain DataLoader.
- A place is the number of a sample in the reader's epoch.
- An item is what a sample has become after decoding and the user's functions.
- An epoch with a fixed number of samples per reader goes through the dataset as often as that
  takes. Each time is a pass.

Shards are uncounted if their numbers of samples are unknown. Their epoch is read in shares and
steps:

- A share is the shards that are dealt to one reader. In an epoch with a fixed number of samples, a
  reader goes on to further shares.
- A step takes some samples of each of a few shards of a share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple

from shardcache_client.batches.maker import (
    BadCounts,
    ItemMaker,
    Maker,
    RawPart,
    Skips,
    StoppedError,
    no_good_sample,
)
from shardcache_client.batches.rank_batches import first_shards, no_shards
from shardcache_client.batches.rank_work import RankWork, Reading
from shardcache_client.batches.threads import Check, nothing_to_check
from shardcache_client.daemon.session import Session
from shardcache_client.handlers import for_epoch, reraise
from shardcache_client.order.dealing.deal import ShardDeal, SpanDeal
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.topology import Topology
from shardcache_client.order.uncounted import StepPlace, UncountedEpoch
from shardcache_client.position.staged_state import Resume
from shardcache_client.reading.epochs.epoch_plans import (
    MAX_VISITS,
    EpochPlans,
    PlacesReader,
    ReadResult,
)
from shardcache_client.reading.epochs.scattered_reader import reader_of
from shardcache_client.reading.epochs.uncounted_reader import UncountedReader
from shardcache_client.stages.stage import Placed

# Stands for the unknown length of an epoch: it is more than the number of places of any epoch.
_ENDLESS = 1 << 62


class Chunk(NamedTuple):
    """The items of a run of places, of which some may be left out.

    Attributes:
        items: items that are not left out, with their places.
        end: the place after the run.
        steps: the steps of uncounted shards that were begun, from the step with the first place of
            the chunk on; empty if samples are counted.
        first_error: the first error that a handler has skipped so far; "" if there is none.
    """

    items: list[Placed]
    end: int
    steps: tuple[StepPlace, ...] = ()
    first_error: str = ""


class SharePlace(NamedTuple):
    """A place in a reader's epoch, and the share that has it.

    Attributes:
        place: the place.
        share: number of the share, from 0; always 0 if samples are counted.
    """

    place: int
    share: int = 0


class RankChunks(RankWork):
    """The chunks of one reader's epoch, or of the rest of one.

    Args:
        reading: means of reading the dataset.
        resume: position from which the epoch is read.
        reader: the rank or worker that reads.
        size: number of places of a chunk.

    Attributes:
        places: number of places in the epoch; None if it is unknown.
    """

    def __init__(self, reading: Reading, resume: Resume, reader: Topology, size: int) -> None:
        super().__init__(reading)
        self._resume = resume
        self._reader = reader
        self._size = size
        self._start_place = resume.reached.mark.place
        self._epoch = resume.progress.epoch
        # This is last: `_counted_order` is computed from the attributes above.
        self.places = None if self._counted_order is None else len(self._counted_order)

    def __repr__(self) -> str:
        return f"RankChunks({self._resume!r}, {self._reader})"

    # The order of the epoch is one of these two, according to the deal.

    @cached_property
    def _counted_order(self) -> RankEpoch | None:
        """The order if samples are counted; None if they are not."""
        deal = self._reading.deal
        if isinstance(deal, ShardDeal):
            return None
        # A phase is a part of the epoch that the same ranks have read. Even if the ranks of the
        # last phase resume, it counts as past: the readers share what is left of the epoch.
        past_phases = self._resume.progress.past(deal.even)
        share = deal.share(self._epoch, self._reader, past_phases)
        return RankEpoch(share, self._reading.form.manifest)

    @cached_property
    def _uncounted_order(self) -> UncountedEpoch:
        """The order if samples are not counted."""
        deal = self._reading.deal
        assert isinstance(deal, ShardDeal)
        return UncountedEpoch(deal, self._reader, self._epoch)

    @property
    def count(self) -> int:
        """Number of chunks; see `RankWork`."""
        if self.places is None:
            return _ENDLESS
        remaining = max(0, self.places - self._start_place)
        return -(-remaining // self._size)  # rounded up

    def places_of(self, number: int) -> tuple[int, int]:
        """Return the first place of a chunk, and the place after its last."""
        first = self._start_place + number * self._size
        end = first + self._size
        if self.places is not None:
            end = min(end, self.places)
        return first, end

    def open_places_reader(
        self, session: Session, check: Check = nothing_to_check, *, is_shared: bool = False
    ) -> PlacesReader:
        """Return a reader of the samples at this epoch's places; see `RankWork`."""
        # The deque is not used here: `read_part` asks the reader itself for the steps.
        return self._open_recording_reader(session, check, deque(), is_shared=is_shared)

    def _open_recording_reader(
        self,
        session: Session,
        check: Check,
        begun_steps: deque[StepPlace],
        *,
        is_shared: bool,
    ) -> PlacesReader:
        """Return a reader of the samples at this epoch's places, which records the steps it begins.

        For the other arguments, see `RankWork.open_places_reader`.

        Args:
            begun_steps: gets each step of uncounted shards when the step begins.
        """
        form = self._reading.form
        shards_after = self._shards_of_next_epoch()
        plans = EpochPlans(session, form, self._epoch, shards_after, check, is_shared=is_shared)
        if self._counted_order is not None:
            return reader_of(
                session,
                plans,
                self._counted_order,
                self._reading.sessions,
                check,
                self._next_counted_order,
            )
        return UncountedReader(
            plans,
            self._uncounted_order,
            self._resume.reached.step,
            self._start_place,
            begun_steps,
            ends_at_errors=self._reading.on_error is reraise,
        )

    def _next_counted_order(self) -> RankEpoch | None:
        """Return the order of the next epoch of counted samples; None if there is none."""
        if not self._reading.has_epoch_after(self._epoch):
            return None
        deal = self._reading.deal
        assert isinstance(deal, SpanDeal)
        share = deal.share(self._epoch + 1, self._reader)
        return RankEpoch(share, self._reading.form.manifest)

    def _shards_of_next_epoch(self) -> Callable[[], Iterator[int]]:
        """Return a function that yields the numbers of the next epoch's first shards.

        Finding them takes a while, so the function is called only once the plan needs them.
        """
        if not self._reading.has_epoch_after(self._epoch):
            return no_shards
        deal = self._reading.deal
        next_epoch = self._epoch + 1
        if isinstance(deal, ShardDeal):
            return partial(_first_uncounted_shards, UncountedEpoch(deal, self._reader, next_epoch))
        return partial(first_shards, deal, next_epoch, self._reader, self._reading.form.manifest)

    @contextmanager
    def open_maker(self, skips: Skips) -> Iterator[ChunkMaker]:
        """Lend a maker of chunks; see `RankWork`."""
        yield ChunkMaker(self._item_maker(skips))

    def _item_maker(self, skips: Skips) -> ItemMaker:
        """Return a maker of items, which leaves bad samples out."""
        return ItemMaker(
            self._reading.pipeline,
            skips,
            substitutes=None,  # bad samples are left out and not replaced
            rank=self._reader.rank,
            epoch=self._epoch,
        )

    def read_part(self, number: int, places_reader: PlacesReader, session: Session) -> RawPart:
        """Read the samples of a chunk; see `RankWork`."""
        raw = super().read_part(number, places_reader, session)
        if not isinstance(places_reader, UncountedReader):
            return raw
        first, end = self.places_of(number)
        # Too few samples are the only sign that uncounted shards have come to their end.
        is_last = len(raw.reads) < end - first
        return raw._replace(steps=places_reader.steps(first), is_last=is_last)

    @cached_property
    def _pass_places(self) -> int | None:
        """Number of consecutive places that hold every sample, from any place on; None if unknown.

        None as well if samples are not counted.
        """
        deal = self._reading.deal
        if not isinstance(deal, SpanDeal):
            return None
        return deal.pass_places(self._epoch)

    def check_progress(self, last_good: SharePlace, current: SharePlace, first_error: str) -> None:
        """Raise ShardError if every sample has been tried since the last good sample.

        An epoch that lasts until it has yielded a fixed number of samples would otherwise never
        end.

        Args:
            last_good: place of the last item.
            current: place of the sample that is being read.
            first_error: the first error that a handler has skipped; "" if there is none.
        """
        tried = current.place - last_good.place
        if self.places is None:
            # Any `pass_shares` shares in a row have every sample. The shares of the two places
            # may have been tried only in part, so only the shares between them count.
            shares_between = current.share - last_good.share - 1
            all_were_tried = shares_between >= self._uncounted_order.pass_shares
        else:
            all_were_tried = self._pass_places is not None and tried >= self._pass_places
        if all_were_tried:
            is_filtered = self._reading.pipeline.has_filters
            raise no_good_sample(
                self._reader.rank, self._epoch, tried, first_error, is_filtered=is_filtered
            )

    def placed_items(self, bad: BadCounts, begun_steps: deque[StepPlace]) -> Generator[Placed]:
        """Yield the items one by one, each as soon as it is read, and not in chunks.

        Args:
            bad: counts the places that are left out, while the items are yielded.
            begun_steps: gets each step of uncounted shards when the step begins.

        Raises the errors of reading and decoding that the handler does not skip, and what
        `check_progress` raises.
        """
        reading = self._reading
        skips = Skips(for_epoch(reading.on_error))  # `for_epoch` limits the warnings in an epoch
        # Place of the last item: the loop at the end sets it, and `with_checks` reads it. Before
        # the first item it is the start place, so the first check may come one place late, which
        # does no harm.
        first_step = self._resume.reached.step
        last_good = SharePlace(self._start_place, first_step.share)

        def with_checks(reads: Iterator[ReadResult]) -> Iterator[ReadResult]:
            """Yield the results of reading, and check the progress after each bad sample."""
            # The maker takes a result from here before it makes an item of it, so `last_good` is
            # still the last item before this place.
            for place, read in enumerate(reads, self._start_place):
                is_after_bad_sample = place > last_good.place + 1
                if is_after_bad_sample:
                    current = SharePlace(place, _current_share(begun_steps))
                    self.check_progress(last_good, current, skips.first_error)
                yield read

        end = self.places
        if end is None:
            end = self._start_place + _ENDLESS
        with (
            reading.sessions.borrow() as session,
            closing(
                self._open_recording_reader(session, nothing_to_check, begun_steps, is_shared=False)
            ) as places_reader,
        ):
            maker = self._item_maker(skips)
            reads = with_checks(places_reader.reads(self._start_place, end))
            try:
                for placed in maker.placed_items(self._start_place, reads, bad):
                    last_good = SharePlace(placed.place, _current_share(begun_steps))
                    yield placed
            except StoppedError:
                pass  # The handler has ended the epoch.


class ChunkMaker(Maker):
    """Makes the chunks of one epoch. Any thread.

    Args:
        item_maker: makes the items, without substitutes.
    """

    def __init__(self, item_maker: ItemMaker) -> None:
        self._item_maker = item_maker

    def items_of(self, raw: RawPart, bad: BadCounts) -> Iterator[Placed]:
        """Yield the items of a chunk, with their places."""
        return self._item_maker.placed_items(raw.first, raw.reads, bad)

    def gather(self, items: list[Placed], raw: RawPart) -> Chunk:
        """Return the chunk with these items."""
        end = raw.first + len(raw.reads)
        return Chunk(items, end, raw.steps, self._item_maker.skips.first_error)


def _current_share(begun_steps: deque[StepPlace]) -> int:
    """Return the number of the share that is being read; 0 for counted samples, which have none."""
    if not begun_steps:
        return 0
    return begun_steps[-1].share


def _first_uncounted_shards(epoch: UncountedEpoch) -> Iterator[int]:
    """Yield the numbers of the first shards of a reader, at most as many as a plan may have."""
    return islice(epoch.shards(StepPlace()), MAX_VISITS)
