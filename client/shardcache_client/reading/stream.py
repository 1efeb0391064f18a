"""One reader's epoch: the samples of its share, plus replacements for those it skips, and its state after each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardcache.errors import SampleError, ShardError
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, SessionPool
from shardcache_client.decoding.pipeline import Dropped, Pipeline
from shardcache_client.files.slicing import Sample
from shardcache_client.handlers import Handler
from shardcache_client.order.deal import Deal, SpanDeal
from shardcache_client.order.lanes import Share
from shardcache_client.order.manifest import Manifest, Plan
from shardcache_client.position.state import Position, ReaderState
from shardcache_client.reading.leased_shard import ShardWindow
from shardcache_client.reading.samples import SampleReader, Skipped, StoppedError

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

log = logging.getLogger("shardcache")


@dataclass(frozen=True)
class StreamSettings:
    """Settings shared by the streams of a dataset.

    Attributes:
        pipeline: applied to each sample.
        handover: passes samples to other processes without a copy.
        epochs: number of epochs in the training run; None for no limit.
        datasets: identifiers in states, for counted samples (True) and uncounted shards (False).
        seeds: as in a state.
        batching: batch size and drop_last of the loader, if it is known.
    """

    sessions: SessionPool
    manifest: Manifest
    deal: Deal
    pipeline: Pipeline = field(default_factory=Pipeline)
    handover: Handover | None = None
    epochs: int | None = None
    datasets: Mapping[bool, str] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    batching: tuple[int, bool] | None = None

    @property
    def counted(self) -> Manifest | None:
        """The manifest, if samples are dealt; None if whole shards."""
        return self.manifest if self.deal.counted else None


class EpochStream:
    """The samples that one reader reads in an epoch. Iterable once.

    Errors of a shard or a sample go to the handler `on_error`. Raises NoDaemonError if the daemon stays away for longer
    than the session's patience.

    Args:
        position: the position from which the stream resumes, and which it moves on.

    Attributes:
        read: True once the last sample has been yielded.
        topology: place of the reader among those of the job.
        cut: division of the epoch, or its rest, among these.
        share: the reader's own share, from its beginning.
    """

    def __init__(self, settings: StreamSettings, reader: ReaderIdentity, position: Position, on_error: Handler) -> None:
        self.position = position
        self.read = False
        self.topology = reader.topology
        self.cut = settings.deal.cut(reader.topology)
        self._settings = settings
        self._reader = reader
        self._skipped = Skipped(on_error)
        self.share = self._share(0)
        # Samples that a filter leaves out are not replaced: each of the others comes once.
        self._quota = None if settings.pipeline.filters else settings.deal.quota(reader.topology, self.share)

    def __repr__(self) -> str:
        return f"EpochStream({self.position!r}, quota={self._quota})"

    def __iter__(self) -> Iterator[Any]:
        return self.samples()

    def samples(self, when_read: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """Yield the samples; `when_read` is called before the last one is, or when there are none left."""
        position, quota, pipeline = self.position, self._quota, self._settings.pipeline or None
        if quota == position.given or not self.share.segments:
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
                            self._skipped.skip(exn)
                            continue
                        if sample.__class__ is Dropped:
                            self._skipped.samples += sample is Dropped.INCOMPLETE
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
        if self._skipped.shards or self._skipped.samples:
            log.warning(
                "epoch %d: skipped %d shards, and %d samples of other shards, as on_error decided%s",
                position.epoch,
                self._skipped.shards,
                self._skipped.samples,
                "" if quota is None else "; other samples were repeated in their place",
            )

    def _end(self, when_read: Callable[[], object]) -> None:
        self.read = True
        when_read()

    @property
    def counted(self) -> bool:
        """True if samples are dealt, False if whole shards."""
        return self._settings.deal.counted

    @property
    def samples_left(self) -> int:
        """Number of samples still to be yielded, if it is known."""
        return self.left_after(self.position)

    def left_after(self, position: Position) -> int:
        """Return the number of samples to be yielded after a position, if known; at most so many with a filter."""
        return (self.share.behind(position.taken).samples or 0) if self._quota is None else self._quota - position.given

    # State

    def state(self, *, over: bool = False) -> ReaderState:
        """Return the reader's state; at the end of an epoch, samples that the loader drops count as taken."""
        position, deal = self.position.after(self.samples_left if over and self.counted else 0), self._settings.deal
        sources = (position.epoch, self.share, position.time, position.taken)
        return ReaderState(
            dataset=self._settings.datasets[self.counted],
            position=position,
            cut=self.cut,
            counted=self.counted,
            reader=self.topology.reader,
            over=over,
            sources=deal.sources_after(*sources) if isinstance(deal, SpanDeal) else {},
            seeds=self._settings.seeds,
            in_step=over or not self._ends_sooner(),
        )

    def state_in_loader(self) -> ReaderState:
        """Return the reader's state, for a loader that keeps account of the end of the epoch."""
        return replace(self.state(over=self.is_over), over=False)

    @property
    def is_over(self) -> bool:
        """True if the epoch has no more batches on any rank, but for short ones that the loader drops."""
        size, drop_last = self._settings.batching or (1, False)
        read = self.read or (self.counted and self.samples_left < (size if drop_last else 1))
        return read and self.ranks_end_together()

    def ranks_end_together(self) -> bool:
        """Return True if the epoch is known to end after the same number of batches on all ranks."""
        if self.topology.world_size == 1:
            return True
        batching, deal = self._settings.batching, self._settings.deal
        drops = (False, True) if batching is None else (batching[1],)
        return all(deal.ends_together(self.cut, self.position.phases, drop_last=drop_last) for drop_last in drops)

    def _ends_sooner(self) -> bool:
        """Return True if this reader has no batch left, and others may, as the loader drops short ones or might."""
        size, drop_last = self._settings.batching or (self.cut.batch_size, True)
        left = self.samples_left if drop_last and self.counted else size
        return left < size and not self.ranks_end_together()

    # Samples

    def _share(self, time: int) -> Share:
        return self._settings.deal.share(self.position.epoch, time, self.topology, self.position.phases)

    def _samples(self, session: Session) -> Iterator[Sample | None]:
        """Yield the share's samples, None for skipped ones; then replacements of these from other readers' shares."""
        position, after = self.position, self._shards_after()
        fruitless = 0
        while True:
            before, whole = position.given, position.taken == 0
            share = self._share(position.time) if position.time else self.share
            yield from self._once(session, share.behind(position.taken, position.step, position.nth), after)
            if self._quota is None:
                return
            fruitless = fruitless + whole if position.given == before else 0
            if fruitless >= self.topology.readers:
                raise ShardError(
                    f"rank {self.topology.rank}, worker {self.topology.worker} cannot read any sample in epoch "
                    f"{position.epoch}, neither of its own share nor of others'",
                    remedy="see the errors that on_error skipped",
                )
            position.begin_share()

    def _shards_after(self) -> Sequence[int]:
        """Return the shards of the reader's next epoch; none after the last."""
        after, epochs = self.position.epoch + 1, self._settings.epochs
        if epochs is not None and after >= epochs:
            return ()
        return self._settings.deal.share(after, 0, self.topology).shards()

    def _once(self, session: Session, share: Share, after: Sequence[int]) -> Iterator[Sample | None]:
        manifest, view_of = self._settings.manifest, self._settings.pipeline.view
        plan = Plan.of(manifest, self.position.epoch, share.shards(), after)
        session.declare(plan)
        drawn = manifest.choices is not None or any(segment.mixed for segment in share.segments)
        partial, handover = False if drawn else None, self._settings.handover
        window = ShardWindow(session, plan.reads, partial=partial, handover=handover, view_of=view_of)
        reader = SampleReader(self._settings.counted, window, self.position, self._skipped)
        try:
            for segment in share.segments:
                yield from reader.samples(segment)
        finally:
            window.empty()
