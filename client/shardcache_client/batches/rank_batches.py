"""A rank's batches of an epoch, from any number on: read through one session, made in this thread or by others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from shardcache_client.batches.maker import BatchMaker, Collate, MadeBatch, RawBatch, Skips
from shardcache_client.batches.threads import made_by_threads
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, SessionPool
from shardcache_client.decoding import Pipeline
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.deal import SpanDeal
from shardcache_client.order.lanes import Share
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.rounds import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.reading.place_reader import PLANNED, PlaceReader, Read, SampleForm, read_alone

log = logging.getLogger("shardcache")


@dataclass(frozen=True, slots=True)
class BatchForm:
    """The form of a loader's batches.

    Attributes:
        size: number of samples.
        drop_last: True to leave out a last batch of fewer.
        collate: makes a batch of a list of samples.
    """

    size: int
    drop_last: bool
    collate: Collate


class RankBatches:
    """The batches that a rank reads of an epoch, or of its rest.

    Args:
        deal: of the dataset's counted samples.
        form, pipeline: of its samples; the pipeline without filters.
        progress: of all ranks in the epoch so far.
    """

    def __init__(
        self,
        deal: SpanDeal,
        form: SampleForm,
        pipeline: Pipeline,
        progress: Progress,
        topology: Topology,
        batches: BatchForm,
    ) -> None:
        start = progress.start_of(deal, topology)
        self._share = deal.share(progress.epoch, 0, topology, start.phases)
        self._epoch = RankEpoch(self._share, form.manifest)
        self._deal = deal
        self._form = form
        self._pipeline = pipeline
        self._progress = progress
        self._topology = topology
        self._batches = batches
        self._passed = start.passed

    def __len__(self) -> int:
        """Return the number of batches."""
        left = max(0, len(self._epoch) - self._passed)
        size = self._batches.size
        return left // size if self._batches.drop_last else -(-left // size)

    def read(
        self, sessions: SessionPool, reader: ReaderIdentity, on_error: Handler, *, skip: int = 0, threads: int = 0
    ) -> Iterator[Any]:
        """Yield the batches, without the first `skip`, made by so many threads, or by this one if there are none.

        Raises the errors of reading and decoding that the handler does not skip.
        """
        skips = Skips(for_epoch(on_error))
        spare = _Spare(sessions, reader, self._form, self._share)
        maker = BatchMaker(self._pipeline, self._batches.collate, len(self._epoch), skips, spare.read)

        def raw(check: Callable[[], None]) -> Generator[RawBatch]:
            return self._raw(sessions, reader, skip, check)

        with closing(spare):
            if threads:
                made = made_by_threads(raw, maker.make, threads=threads, ahead=2 * threads + 1)
            else:
                made = _made_here(raw(lambda: None), maker)
            # Closed here: an error's traceback would keep what is merely dropped.
            with closing(made):
                yield from _until_last(made)
        if skips.samples or skips.shards:
            log.warning(
                "epoch %d: skipped %d shards, and %d samples of other shards, as on_error decided; other samples were "
                "repeated in their place",
                self._progress.epoch,
                skips.shards,
                skips.samples,
            )

    def _raw(
        self, sessions: SessionPool, reader: ReaderIdentity, skip: int, check: Callable[[], None]
    ) -> Generator[RawBatch]:
        """Yield what the batches are made of, from number `skip` on."""
        if skip >= len(self):
            return
        with sessions.borrow(reader) as session:
            following = partial(
                _first_shards, self._deal, self._progress.epoch + 1, self._topology, self._form.manifest
            )
            places = PlaceReader(session, self._form, self._epoch, self._progress.epoch, following, check)
            with closing(places):
                for number in range(skip, len(self)):
                    first = self._passed + number * self._batches.size
                    last = min(first + self._batches.size, len(self._epoch))
                    yield RawBatch(number, first, places.between(first, last))


def _first_shards(deal: SpanDeal, epoch: int, topology: Topology, manifest: Manifest) -> Iterator[int]:
    """Yield the first shards of a rank's epoch, as many as a plan has."""
    visits = RankEpoch(deal.share(epoch, 0, topology), manifest).visits()
    return (visit.shard for visit in islice(visits, PLANNED))


def _made_here(raw: Generator[RawBatch], maker: BatchMaker) -> Generator[MadeBatch]:
    with closing(raw):
        for batch in raw:
            yield maker.make(batch)


def _until_last(made: Iterator[MadeBatch]) -> Iterator[Any]:
    for batch in made:
        if batch.batch is not None:
            yield batch.batch
        if batch.is_last:
            return


class _Spare:
    """Reads single places, such as those of substitutes, through a session that is opened when one is needed."""

    def __init__(self, sessions: SessionPool, reader: ReaderIdentity, form: SampleForm, share: Share) -> None:
        self._sessions = sessions
        self._reader = reader
        self._form = form
        self._epoch = RankEpoch(share, form.manifest)  # of its own: finding places changes what is kept
        self._session: Session | None = None
        self._lock = threading.Lock()

    def read(self, number: int) -> Read:
        """Return what is read at a place. Any thread."""
        (place,) = self._epoch.between(number, number + 1)
        with self._lock:
            if self._session is None:
                self._session = self._sessions.open(self._reader)
            return read_alone(self._session, self._form, place)

    def close(self) -> None:
        """Close the session, if there is one."""
        if self._session is not None:
            self._session.close()
