"""One reader's epoch: the samples of its share, plus replacements for those it skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardcache.errors import SampleError, ShardError
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, SessionPool
from shardcache_client.decoding.pipeline import Dropped, Pipeline
from shardcache_client.files.slicing import Sample
from shardcache_client.handlers import Handler
from shardcache_client.order.deal import Deal
from shardcache_client.order.lanes import Share
from shardcache_client.order.manifest import Manifest, Plan
from shardcache_client.position.progress import ReaderPosition, StoppedError
from shardcache_client.position.state import Place, Resumption
from shardcache_client.reading.samples import SampleReader
from shardcache_client.reading.shard_window import ShardWindow
from shardcache_client.topology import Topology

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


@dataclass(frozen=True)
class StreamSettings:
    """Settings shared by the streams of a dataset.

    Attributes:
        pipeline: applied to each sample.
        handover: passes samples to other processes without a copy.
        epochs: number of epochs in the training run; None for no limit.
    """

    sessions: SessionPool
    manifest: Manifest
    deal: Deal
    pipeline: Pipeline = field(default_factory=Pipeline)
    handover: Handover | None = None
    epochs: int | None = None

    @property
    def counted(self) -> Manifest | None:
        """The manifest, if samples are dealt; None if whole shards."""
        return self.manifest if self.deal.counted else None


def _unheard() -> None:
    """Do nothing: the default callback."""


class EpochStream:
    """The samples that one reader reads in an epoch. Iterable once.

    Errors of a shard or a sample go to the handler `on_error`. Raises NoDaemonError if the daemon stays away for longer
    than the session's patience.

    Attributes:
        start: the point from which the stream resumes; the position tracks progress after it.
        read: True once the last sample has been yielded.
    """

    def __init__(self, settings: StreamSettings, reader: ReaderIdentity, start: Resumption, on_error: Handler) -> None:
        self.start = start
        self.read = False
        self.position = ReaderPosition.at(start.place, on_error)
        self._settings = settings
        self._reader = reader
        self._first = self._share(0)
        # Samples that a filter leaves out are not replaced: each of the others comes once.
        self._quota = None if settings.pipeline.filters else settings.deal.quota(reader.topology, self._first)

    def __repr__(self) -> str:
        return f"EpochStream(epoch={self.start.epoch}, {self.position.place!r}, quota={self._quota})"

    def __iter__(self) -> Iterator[Any]:
        return self.samples()

    def samples(self, when_read: Callable[[], object] = _unheard) -> Iterator[Any]:
        """Yield the samples.

        Args:
            when_read: called before the last sample is yielded, or when there are none left.
        """
        position, quota, pipeline = self.position, self._quota, self._settings.pipeline or None
        if quota == position.given or not self._first.segments:
            self._end(when_read)
            return
        with self._settings.sessions.borrow(self._reader) as session:
            try:
                for sample in self._samples(session):
                    if sample is None:
                        continue
                    if pipeline is not None:
                        try:
                            sample = pipeline(sample)
                        except SampleError as exn:
                            position.skip(exn)
                            continue
                        if sample.__class__ is Dropped:
                            position.skipped_samples += sample is Dropped.INCOMPLETE
                            continue
                    position.given += 1
                    if position.given == quota:
                        self._end(when_read)  # now, as a loop that knows the number of samples requests no more
                        yield sample
                        break
                    yield sample
                else:
                    self._end(when_read)
            except StoppedError:
                self._end(when_read)
                session.close()
        position.report(self.start.epoch, made_up=quota is not None)

    def _end(self, when_read: Callable[[], object]) -> None:
        self.read = True
        when_read()

    @property
    def topology(self) -> Topology:
        """Place of the reader among those of the job."""
        return self._reader.topology

    @property
    def deal(self) -> Deal:
        """The deal that determines the reader's share."""
        return self._settings.deal

    @property
    def counted(self) -> bool:
        """True if samples are dealt, False if whole shards."""
        return self._settings.deal.counted

    @property
    def share(self) -> Share:
        """The reader's own share, from its beginning."""
        return self._first

    @property
    def samples_left(self) -> int:
        """Number of samples still to be yielded, if it is known."""
        return self.left_after(self.position.place)

    def left_after(self, place: Place) -> int:
        """Return the number of samples to be yielded after a place, if it is known; at most so many with a filter."""
        return (self._first.behind(place).samples or 0) if self._quota is None else self._quota - place.given

    def _share(self, time: int) -> Share:
        return self._settings.deal.share(self.start.epoch, time, self._reader.topology, self.start.phases)

    def _samples(self, session: Session) -> Iterator[Sample | None]:
        """Yield the samples of the share, then replacements from other readers' shares for those that were skipped.

        None stands for a skipped sample.
        """
        after = self._shards_after()
        fruitless = 0
        while True:
            before, whole = self.position.given, self.position.taken == 0
            share = self._share(self.position.time) if self.position.time else self._first
            yield from self._once(session, share.behind(self.position.place), after)
            if self._quota is None:
                return
            fruitless = fruitless + whole if self.position.given == before else 0
            if fruitless >= self._reader.topology.readers:
                raise ShardError(
                    f"rank {self._reader.topology.rank}, worker {self._reader.topology.worker} cannot read any sample "
                    f"in epoch {self.start.epoch}, neither of its own share nor of others'",
                    remedy="see the errors that on_error skipped",
                )
            self.position.begin_again()

    def _shards_after(self) -> Sequence[int]:
        """Return the shards of the reader's next epoch; none after the last."""
        after, epochs = self.start.epoch + 1, self._settings.epochs
        if epochs is not None and after >= epochs:
            return ()
        return self._settings.deal.share(after, 0, self._reader.topology).shards()

    def _once(self, session: Session, share: Share, after: Sequence[int]) -> Iterator[Sample | None]:
        plan = Plan.of(self._settings.manifest, self.start.epoch, share.shards(), after)
        session.declare(plan)
        drawn = self._settings.manifest.choices is not None or any(segment.mixed for segment in share.segments)
        shard_window = ShardWindow(
            session,
            plan.reads,
            partial=False if drawn else None,
            handover=self._settings.handover,
            view_of=self._settings.pipeline.view,
        )
        reader = SampleReader(self._settings.counted, shard_window, self.position)
        try:
            for segment in share.segments:
                yield from reader.samples(segment)
        finally:
            shard_window.empty()
