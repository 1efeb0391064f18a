"""A rank's work in an epoch, or in the rest of one, in numbered parts.

A part is a batch, or a chunk of samples for a stage. It is made of the samples at some places: a
place is the number of a sample in the rank's epoch. First one thread reads the samples, part by
part. Then any thread decodes and collates the samples of a part.

Loaders use this class through `RankBatches` for batches and `RankChunks` for chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from time import monotonic

from shardcache_client.batches.maker import Collate, MadePart, Maker, RawPart, Skips
from shardcache_client.batches.threads import Check, made_by_threads, nothing_to_check
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.dealing.deal import Deal
from shardcache_client.reading.epochs.epoch_plans import PlacesReader, ReadResult, SampleForm
from shardcache_client.stages.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class BatchForm:
    """The form of a loader's batches.

    Attributes:
        size: number of samples in a batch; None for samples one by one.
        drop_last: True to leave out the last batch if it is short.
        collate: makes a batch of a list of samples.
    """

    size: int | None
    drop_last: bool
    collate: Collate

    @property
    def places_per_batch(self) -> int:
        """Number of places of a whole batch; 1 for samples one by one."""
        return self.size or 1


@dataclass(frozen=True)
class Reading:
    """Means of reading a dataset's samples, the same for every epoch.

    An object of this class can be pickled if its functions can.

    Attributes:
        deal: division of the dataset's samples among readers, or of its shards if these are not
            counted.
        form: form in which the samples are read from their shards.
        pipeline: makes items of the samples.
        sessions: the reader's connections to the daemon.
        on_error: handler that decides about samples and shards that cannot be read.
        epochs: number of epochs in the training run; None for no limit.
    """

    deal: Deal
    form: SampleForm
    pipeline: Pipeline
    sessions: ReaderSessions
    on_error: Handler
    epochs: int | None = None

    def has_epoch_after(self, epoch: int) -> bool:
        """Return True if the run has another epoch after this one."""
        return self.epochs is None or epoch + 1 < self.epochs


def unchanged(part: MadePart) -> MadePart:
    """Return a part unchanged: the default for `finish`."""
    return part


class RankWork(ABC):
    """The parts of a rank's work in an epoch, or in the rest of one.

    Args:
        reading: means of reading the dataset.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of parts, which may be too large for `len`; a maximum if it is unknown."""

    @abstractmethod
    def places_of(self, number: int) -> tuple[int, int]:
        """Return the first place of a part, and the place after its last."""

    @abstractmethod
    def open_places_reader(
        self, session: Session, check: Check = nothing_to_check, *, is_shared: bool = False
    ) -> PlacesReader:
        """Return a reader of the samples at this epoch's places; the caller must close it.

        Args:
            session: connection to the daemon by which shards are leased.
            check: may end a wait; see `Check`.
            is_shared: True if other processes read other places of this epoch.
        """

    @abstractmethod
    def open_maker(self, skips: Skips) -> AbstractContextManager[Maker]:
        """Lend a maker, which makes each part of the samples read at the part's places.

        Args:
            skips: passes the errors of bad samples to the user's handler.
        """

    def read_part(self, number: int, places_reader: PlacesReader, session: Session) -> RawPart:
        """Read the samples of a part.

        Args:
            number: number of the part.
            places_reader: result of `open_places_reader`.
            session: the reader's session, which counts the time spent waiting.
        """
        begun_s = monotonic()
        waited_before_s = session.waited_s
        first, end = self.places_of(number)
        reads: Sequence[ReadResult] = list(places_reader.reads(first, end))
        return RawPart(
            first,
            reads,
            reading_s=monotonic() - begun_s,
            waited_s=session.waited_s - waited_before_s,
        )

    def parts(
        self,
        *,
        start: int = 0,
        threads: int = 0,
        ahead: int = 2,
        begin: Callable[[], object] = lambda: None,
        finish: Callable[[MadePart], MadePart] = unchanged,
    ) -> Generator[MadePart]:
        """Yield the parts in the order of their numbers.

        Args:
            start: number of the first part to yield.
            threads: number of threads that make the parts; 0 to make them in the calling thread.
            ahead: maximum number of parts per thread that are begun or made, but not yet taken.
            begin: called first in each of these threads.
            finish: called with each part in the thread that made it; returns the part to yield.

        Raises the errors of reading and decoding that the handler does not skip.
        """

        def read_parts(check: Check) -> Generator[RawPart]:
            """Yield the results of reading each part."""
            if start >= self.count:
                return
            reading = self._reading
            with (
                reading.sessions.borrow() as session,
                closing(self.open_places_reader(session, check)) as places_reader,
            ):
                for number in range(start, self.count):
                    yield self.read_part(number, places_reader, session)

        skips = Skips(for_epoch(self._reading.on_error))  # `for_epoch` limits its warnings
        with self.open_maker(skips) as maker:

            def make_part(raw: RawPart) -> MadePart:
                """Return the part made of the results of reading it."""
                return finish(maker.make(raw))

            if threads:
                parts = made_by_threads(
                    read_parts, make_part, threads=threads, ahead=ahead * threads, begin=begin
                )
            else:
                parts = _made_here(read_parts(nothing_to_check), make_part)
            # The generator is closed here: the traceback of an error would keep it alive if it were
            # merely dropped.
            with closing(parts):
                yield from parts


def _made_here(
    raw_parts: Generator[RawPart], make_part: Callable[[RawPart], MadePart]
) -> Generator[MadePart]:
    """Yield the parts, each of which the calling thread makes when it is asked for."""
    with closing(raw_parts):
        for raw in raw_parts:
            yield make_part(raw)
