"""A rank's work in an epoch, or its rest, in numbered parts: what each is made of, and who makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from shardcache_client.batches.maker import Collate, ItemMaker, MadeBatch, RawBatch, Skips
from shardcache_client.batches.threads import made_by_threads
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, SessionPool
from shardcache_client.decoding import Pipeline
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.deal import Deal
from shardcache_client.reading.place_reader import LoneReader, Read, SampleForm


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
        deal: of the dataset's samples, or of its shards if these are not counted.
        form: of the samples, as they are read.
        pipeline: what they go through then.
        epochs: number of epochs in the training run; None for no limit.
    """

    deal: Deal
    form: SampleForm
    pipeline: Pipeline
    sessions: SessionPool
    identity: ReaderIdentity
    on_error: Handler
    epochs: int | None = None

    def has_epoch_after(self, epoch: int) -> bool:
        """Return True if another epoch comes after one."""
        return self.epochs is None or epoch + 1 < self.epochs


class Places(Protocol):
    """Reads the samples at the places of an epoch, in ascending order."""

    def reads(self, start: int, stop: int) -> Iterator[Read]:
        """Yield what is read at the places from `start` to `stop`; places may be left out, but not returned to."""

    def close(self) -> None:
        """Release all shards."""


class Maker(Protocol):
    """Makes the parts of one epoch. Any thread."""

    def make(self, raw: RawBatch) -> MadeBatch:
        """Return a part. Raises the errors of decoding that the handler does not skip."""


class RankWork(ABC):
    """The parts of a rank's work in an epoch, or in its rest.

    Args:
        reading: of the dataset.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of parts, which may be too large for `len`; at most so many if it is not known."""

    @abstractmethod
    def places_of(self, number: int) -> tuple[int, int]:
        """Return the first place of a part, and the one after its last."""

    @abstractmethod
    def place_reader(
        self, session: Session, check: Callable[[], None] = lambda: None, *, is_shared: bool = False
    ) -> Places:
        """Return a reader of the places of this epoch, to be closed."""

    @abstractmethod
    def lone_reader(self) -> LoneReader:
        """Return a reader of single places, to be closed."""

    @abstractmethod
    def item_maker(self, skips: Skips, lone: LoneReader) -> ItemMaker:
        """Return what makes an item of what is read at its place."""

    @abstractmethod
    def maker(self, skips: Skips, lone: LoneReader) -> Maker:
        """Return what makes a part of what is read at its places."""

    def raw(self, number: int, places: Any, session: Session) -> RawBatch:
        """Return what a part is made of."""
        begun_s = monotonic()
        waited_s = session.waited_s
        first, end = self.places_of(number)
        reads: Sequence[Read] = list(places.reads(first, end))
        return RawBatch(first, reads, monotonic() - begun_s, session.waited_s - waited_s)

    def made(
        self, *, skip: int = 0, threads: int = 0, ahead: int = 2, begin: Callable[[], object] = bool
    ) -> Generator[MadeBatch]:
        """Yield the parts without the first `skip`, made by so many threads, or by this one if there are none.

        Args:
            ahead: maximum number of parts that each thread has begun or made, and nobody has taken.
            begin: is called by each of these threads first.

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
                made = made_by_threads(raw, maker.make, threads=threads, ahead=ahead * threads, begin=begin)
            else:
                made = _made_here(raw(nothing_to_check), maker)
            # Closed here: an error's traceback would keep what is merely dropped.
            with closing(made):
                yield from made


def nothing_to_check() -> None:
    """Raise nothing, where nobody ends a wait."""


def _made_here(raw: Generator[RawBatch], maker: Maker) -> Generator[MadeBatch]:
    with closing(raw):
        for batch in raw:
            yield maker.make(batch)
