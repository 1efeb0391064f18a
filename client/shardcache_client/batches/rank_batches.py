"""A rank's batches of an epoch, or of its rest: how many there are, what each is made of, and who makes it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from time import monotonic
from typing import Any

from shardcache_client.batches.maker import (
    Bad,
    BatchMaker,
    Collate,
    ItemMaker,
    MadeBatch,
    RawBatch,
    Skips,
    StoppedError,
)
from shardcache_client.batches.threads import made_by_threads
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, SessionPool
from shardcache_client.decoding import Pipeline
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.deal import SpanDeal
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.rank_epoch import RankEpoch, substitutes
from shardcache_client.order.rounds import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.reading.place_reader import PLANNED, LoneReader, PlaceReader, Read, SampleForm


@dataclass(frozen=True, slots=True)
class BatchForm:
    """The form of a loader's batches.

    Attributes:
        size: number of samples; None for samples one by one.
        drop_last: True to leave out a last batch of fewer.
        collate: makes a batch of a list of samples.
    """

    size: int | None
    drop_last: bool
    collate: Collate

    @property
    def places(self) -> int:
        """Number of places of a batch."""
        return self.size or 1


@dataclass(frozen=True)
class Reading:
    """What reading a dataset's samples takes, whatever the epoch. Can be pickled if its functions can.

    Attributes:
        deal: of the dataset's counted samples.
        form: of the samples, as they are read.
        pipeline: what they go through then; without filters.
        epochs: number of epochs in the training run; None for no limit.
    """

    deal: SpanDeal
    form: SampleForm
    pipeline: Pipeline
    sessions: SessionPool
    identity: ReaderIdentity
    on_error: Handler
    epochs: int | None = None


class RankBatches:
    """The batches that a rank reads of an epoch, or of its rest.

    Args:
        reading: of the dataset.
        progress: of all ranks in the epoch so far.
        topology: the rank.
        batches: their form.
        is_read: True if nothing is left of the epoch, whatever the progress says.
    """

    def __init__(
        self,
        reading: Reading,
        progress: Progress,
        topology: Topology,
        batches: BatchForm,
        *,
        is_read: bool = False,
    ) -> None:
        start = progress.start_of(reading.deal, topology)
        share = reading.deal.share(progress.epoch, 0, topology, start.phases)
        self.progress = progress
        self._reading = reading
        self._topology = topology
        self._batches = batches
        self._share = share
        self._passed = start.passed
        self._epoch = RankEpoch(share, reading.form.manifest)
        if is_read:
            self._passed = len(self._epoch)

    def __repr__(self) -> str:
        return f"RankBatches({self.progress!r}, batches={len(self)})"

    @property
    def samples(self) -> int:
        """Number of samples."""
        return max(0, len(self._epoch) - self._passed)

    @cached_property
    def count(self) -> int:
        """Number of batches, which may be too large for `len`."""
        size = self._batches.places
        return self.samples // size if self._batches.drop_last else -(-self.samples // size)

    def __len__(self) -> int:
        return self.count

    def after(self, batches: int) -> Progress:
        """Return the progress once each rank has taken so many."""
        return self.progress.after(self._topology.world_size, self._batches.places, batches)

    def places_of(self, number: int) -> tuple[int, int]:
        """Return the first place of a batch, and the one after its last."""
        first = self._passed + number * self._batches.places
        return first, min(first + self._batches.places, len(self._epoch))

    def maker(self, skips: Skips, lone: LoneReader) -> BatchMaker:
        """Return what makes a batch of what is read at its places."""
        return BatchMaker(self.item_maker(skips, lone), self._batches.collate, self._batches.size)

    def item_maker(self, skips: Skips, lone: LoneReader) -> ItemMaker:
        """Return what makes an item of what is read at its place."""
        reading = self._reading
        substitutes = None if reading.deal.even is None else partial(self._substitutes, lone=lone)
        return ItemMaker(reading.pipeline, skips, substitutes, self._topology.rank, self.progress.epoch)

    def _substitutes(self, place: int, lone: LoneReader) -> Iterator[Read]:
        """Yield what is read in place of a bad sample: samples of the whole epoch, whichever rank has them."""
        reading, epoch = self._reading, self.progress.epoch
        whole = RankEpoch(reading.deal.share(epoch, 0, Topology()), reading.form.manifest)
        places = len(whole)
        before = places * self._topology.rank // self._topology.world_size
        every = reading.deal.pass_places(epoch) or places
        for number in substitutes((before + place) % places, places, every):
            (found,) = whole.between(number, number + 1)
            yield lone.read(found)

    def lone_reader(self) -> LoneReader:
        """Return a reader of single places, to be closed."""
        reading = self._reading
        return LoneReader(partial(reading.sessions.open, reading.identity), reading.form)

    def place_reader(
        self, session: Session, check: Callable[[], None] = lambda: None, *, is_shared: bool = False
    ) -> PlaceReader:
        """Return a reader of the places of this epoch, to be closed."""
        reading = self._reading
        after = self.progress.epoch + 1
        following: Callable[[], Iterator[int]] = _nothing
        if reading.epochs is None or after < reading.epochs:
            following = partial(_first_shards, reading.deal, after, self._topology, reading.form.manifest)
        return PlaceReader(
            session, reading.form, self._epoch, self.progress.epoch, following, check, is_shared=is_shared
        )

    def raw(self, number: int, places: PlaceReader, session: Session) -> RawBatch:
        """Return what a batch is made of."""
        begun_s, waited_s = monotonic(), session.waited_s
        first, end = self.places_of(number)
        reads = places.between(first, end)
        return RawBatch(first, reads, monotonic() - begun_s, session.waited_s - waited_s)

    def made(self, *, skip: int = 0, threads: int = 0, ahead: int = 2) -> Generator[MadeBatch]:
        """Yield the batches without the first `skip`, made by so many threads, or by this one if there are none.

        Args:
            ahead: maximum number of batches that each thread has begun or made, and nobody has taken.

        Raises the errors of reading and decoding that the handler does not skip.
        """

        def raw(check: Callable[[], None]) -> Generator[RawBatch]:
            if skip >= self.count:
                return
            reading = self._reading
            with (
                reading.sessions.borrow(reading.identity) as session,
                closing(self.place_reader(session, check)) as places,
            ):
                for number in range(skip, self.count):
                    yield self.raw(number, places, session)

        with closing(self.lone_reader()) as lone:
            maker = self.maker(Skips(for_epoch(self._reading.on_error)), lone)
            if threads:
                made = made_by_threads(raw, maker.make, threads=threads, ahead=ahead * threads)
            else:
                made = _made_here(raw(_nothing_to_check), maker)
            # Closed here: an error's traceback would keep what is merely dropped.
            with closing(made):
                yield from made

    def place(self, sample: int) -> int:
        """Return the place of a sample, counted from where the epoch is resumed."""
        return self._passed + sample

    def after_samples(self, samples: int, batch_size: int) -> Progress:
        """Return the progress once each rank has passed so many places; in batches, if they are whole ones."""
        return self.progress.after_samples(self._topology.world_size, batch_size, samples)

    def items(self, runs: Iterable[tuple[int, int]], bad: Bad, *, is_shared: bool = False) -> Generator[Any]:
        """Yield the items of some places, one by one, and note the bad ones; `is_shared` as for `PlaceReader`.

        Args:
            runs: first place and end of each run, ascending.
        """
        reading = self._reading
        with (
            closing(self.lone_reader()) as lone,
            reading.sessions.borrow(reading.identity) as session,
            closing(self.place_reader(session, is_shared=is_shared)) as places,
        ):
            maker = self.item_maker(Skips(for_epoch(reading.on_error)), lone)
            try:
                for first, end in runs:
                    yield from maker.items(first, places.reads(first, end), bad)
            except StoppedError:
                pass


def _nothing() -> Iterator[int]:
    return iter(())


def _nothing_to_check() -> None:
    pass


def _first_shards(deal: SpanDeal, epoch: int, topology: Topology, manifest: Manifest) -> Iterator[int]:
    """Yield the first shards of a rank's epoch, as many as a plan has."""
    visits = RankEpoch(deal.share(epoch, 0, topology), manifest).visits()
    return (visit.shard for visit in islice(visits, PLANNED))


def _made_here(raw: Generator[RawBatch], maker: BatchMaker) -> Generator[MadeBatch]:
    with closing(raw):
        for batch in raw:
            yield maker.make(batch)
