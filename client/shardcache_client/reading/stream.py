"""One reader's epoch: the samples of its share, plus replacements for those it skips, and its state after each.

Samples come in file order, mixed, or of several lanes in turns. Each place of a part of the share gives its sample, or
None if that could not be read and the handler has skipped it.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from shardcache.errors import CapacityError, DiskFullError, OriginError, SampleError, ShardError, ShardTimeoutError
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, SessionPool
from shardcache_client.decoding import Dropped, Pipeline
from shardcache_client.files import Sample
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.deal import Deal, SpanDeal
from shardcache_client.order.lanes import Interleaved, Mix, Part, Segment, Share, Strided
from shardcache_client.order.manifest import Manifest, Plan
from shardcache_client.order.rounds import Topology
from shardcache_client.position.state import Position, ReaderState
from shardcache_client.reading.leased_shard import LeasedShard, ShardWindow
from shardcache_client.reading.skips import Skipped, StoppedError

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

log = logging.getLogger("shardcache")

T = TypeVar("T")
Draw = Callable[[], Sample]
"""Returns a sample; to be called at most once, and before the next draw is taken."""

# Errors of a single shard. Any other would affect the next shard as well, so the handler is not called.
_SHARD_ERRORS = (OriginError, ShardError, CapacityError, DiskFullError, ShardTimeoutError)

# Limit on open requests: the daemon stops reading from a session with too many, and a wide window needs many shards.
_MAX_AT_ONCE = 8

# A plan has about this number of shards, or as many as the dataset; of a longer epoch, it is a part.
# The daemon keeps it in memory, and knows the next part while it serves this one.
_MIN_PLANNED = 4_000


class _LostError(Exception):
    """The sample's shard could not be opened, and the handler has been called for it."""


def _lost(_number: int) -> Sample:
    raise _LostError


@dataclass(frozen=True, slots=True)
class _HeldPiece:
    """A piece that the reader holds; its samples are numbers in the shard, in the order of their spread over steps."""

    leased_shard: LeasedShard
    numbers: Sequence[int]
    cut: Callable[[int], Sample]


@dataclass(slots=True, eq=False, repr=False)
class SampleReader:
    """Reads parts of a share through one window of shards.

    A lane takes a shard from the window when its turn needs one. A turn whose sample is skipped or not wanted is over,
    too, so the lanes take their shards in the order of the plan, whatever happens.
    """

    _manifest: Manifest | None  # the dataset's, if samples are dealt; else None
    _shard_window: ShardWindow
    _position: Position
    _skip: Callable[[Exception], None]

    def samples(self, part: Part) -> Generator[Sample | None]:
        """Yield the sample of each place of a part, None in place of a skipped one."""
        if isinstance(part, Segment):
            by_number = part.mixed or (self._manifest is not None and self._manifest.choices is not None)
            return self._mixed(part) if by_number else self._in_order(part)
        if isinstance(part, Strided):
            return self._strided(part)
        assert isinstance(part, Interleaved)
        return self._interleaved(part)

    def _in_order(self, segment: Segment) -> Generator[Sample | None]:
        """Read a segment whose pieces come one after another in file order; also from files that are still arriving."""
        for step, first, last in segment.steps():
            piece = segment.mix.pieces[step]
            self._begin_step(step, first)
            stop = piece.stop if last is None else piece.start + last
            count = None if self._manifest is None else self._manifest[piece.shard].samples
            span = (piece.start + first, stop)
            leased_shard = self._shard_window.take(piece.shard, count, span, is_fresh=_is_whole(span, count))
            try:
                leased_shard.open()
                self._shard_window.ask(1)
                yield from self._rest_of(leased_shard)
            except _SHARD_ERRORS as exn:
                self._skip(exn)
                for _ in range(0 if stop is None else stop - leased_shard.number):
                    self._position.taken += 1
                    yield None
            finally:
                self._shard_window.give_back(leased_shard)

    def _rest_of(self, leased_shard: LeasedShard) -> Iterator[Sample | None]:
        while True:
            try:
                for sample in leased_shard.samples():
                    self._position.taken += 1
                    yield sample
                return
            except SampleError as exn:
                self._position.taken += 1
                self._skip(exn)
                yield None

    def _begin_step(self, step: int, skipped: int) -> None:
        if self._manifest is None:  # else the number of samples passed is position enough
            self._position.begin_step(step, skipped)

    # Samples by number: each piece permuted, then mixed; those of a selection also in file order

    def _mixed(self, segment: Segment) -> Generator[Sample | None]:
        position = self._position
        for draws in self._steps(segment):
            for draw in draws:  # as `_drawn`, whose call would cost a shuffled reader a twentieth of its rate
                position.taken += 1
                try:
                    sample: Sample | None = draw()
                except SampleError as exn:
                    self._skip(exn)
                    sample = None
                except _LostError:
                    sample = None
                yield sample

    def _drawn(self, draw: Draw) -> Sample | None:
        self._position.taken += 1
        try:
            return draw()
        except SampleError as exn:
            self._skip(exn)
        except _LostError:
            pass
        return None

    def _steps(self, segment: Segment, *, is_shared: bool = False) -> Iterator[Iterator[Draw]]:
        """Yield the draws of each step, while its pieces are held; `is_shared` if other readers draw from them, too."""
        mix, held = segment.mix, dict[int, _HeldPiece]()
        is_resumed = True  # of the first step, pieces may have been begun before
        for step, first, last in segment.steps():
            self._begin_step(step, first)
            is_resumed = is_resumed and (step, first) != (0, 0)
            self._enter(mix, step, held, is_fresh=not (is_shared or is_resumed))
            is_resumed = False
            yield _draws(mix, step, held, first, last)
            self._leave(mix, step, held)
        self._leave(mix, mix.steps, held)

    def _enter(self, mix: Mix, step: int, held: dict[int, _HeldPiece], *, is_fresh: bool) -> None:
        """Open the pieces of this step that are not held yet, and request the next one ahead.

        They are fresh if no sample of theirs has been drawn in this epoch.
        """
        new = [piece for piece in mix.pieces_at(step) if piece not in held]
        for waiting, piece in zip(range(len(new), 0, -1), new, strict=True):
            self._shard_window.ask(min(waiting, _MAX_AT_ONCE))
            held[piece] = self._open(mix, piece, is_fresh=is_fresh)
        self._shard_window.ask(1)

    def _leave(self, mix: Mix, step: int, held: dict[int, _HeldPiece]) -> None:
        """Release the pieces that are in no later step."""
        staying = mix.pieces_at(step + 1)
        for piece in [piece for piece in held if piece not in staying]:
            self._shard_window.give_back(held.pop(piece).leased_shard)

    def _open(self, mix: Mix, number: int, *, is_fresh: bool) -> _HeldPiece:
        piece = mix.pieces[number]
        count = None if self._manifest is None else self._manifest[piece.shard].samples
        chosen = None if self._manifest is None else self._manifest.chosen(piece.shard)
        is_fresh = is_fresh and _is_whole((piece.start, piece.stop), count)
        leased_shard = self._shard_window.take(piece.shard, count, is_fresh=is_fresh)
        try:
            leased_shard.open()
            count, cut = len(leased_shard.whole), leased_shard.cutter()
        except _SHARD_ERRORS as exn:
            self._skip(exn)
            cut = _lost
        # Four bytes per number, so that held pieces take hardly any memory, however wide the window.
        numbers = piece.numbers((count or 0) if chosen is None else len(chosen), permuted=mix.window > 0)
        if chosen is not None:
            numbers = [chosen[number] for number in numbers]
        return _HeldPiece(leased_shard, array("I", numbers), cut)

    # Lanes

    def _strided(self, part: Strided) -> Generator[Sample | None]:
        with closing(self._draws_of(part.passing())) as draws:
            at = -1
            for place in part.places():
                for _ in range(place - at):
                    draw = next(draws)
                at = place
                yield self._drawn(draw)
            next(draws, None)  # beyond its last sample, where it gives back its shards

    def _interleaved(self, part: Interleaved) -> Generator[Sample | None]:
        lanes = {lane: self.samples(each) for lane, each in part.parts().items()}
        with closing(_in_turn(part, lanes)) as turns:
            for lane, sample in turns:
                yield sample if sample is None else _named(sample, part, lane)

    def _draws_of(self, part: Part) -> Generator[Draw]:
        """Yield each sample as a function that returns it."""
        if isinstance(part, Segment):
            for step in self._steps(part, is_shared=True):
                yield from step
            return
        assert isinstance(part, Interleaved)
        lanes = {lane: self._draws_of(each) for lane, each in part.parts().items()}
        with closing(_in_turn(part, lanes)) as turns:
            for lane, draw in turns:
                yield partial(_draw_named, draw, part, lane)


def _is_whole(span: tuple[int, int | None], count: int | None) -> bool:
    """Return True if a span has all samples of a shard."""
    return span[0] == 0 and span[1] in (None, count)


def _first_shards(deal: Deal, epoch: int, topology: Topology, shards: int) -> Iterable[int]:
    """Return the shards of the first part of a reader's epoch."""
    share = deal.share(epoch, 0, topology)
    return next(share.in_parts(shards)).shards()


def _draws(mix: Mix, step: int, held: Mapping[int, _HeldPiece], first: int, last: int | None) -> Iterator[Draw]:
    held_pieces = [(piece, held[piece]) for piece in mix.pieces_at(step)]
    parts = [mix.part(piece, step, each.numbers) for piece, each in held_pieces]
    order = mix.interleaved(step, [len(part) for part in parts])
    passed = Counter(order[:first])
    cuts = [each.cut for _, each in held_pieces]
    numbers = [iter(part[passed[place] :]) for place, part in enumerate(parts)]
    for place in order[first:last]:
        yield partial(cuts[place], next(numbers[place]))


def _in_turn(part: Interleaved, lanes: Mapping[int, Generator[T]]) -> Generator[tuple[int, T]]:
    try:
        for lane in part.in_turn():
            yield lane, next(lanes[lane])
        for places in lanes.values():
            next(places, None)  # beyond its last sample, where it gives back its shards
    finally:
        for places in lanes.values():
            places.close()


def _draw_named(draw: Draw, part: Interleaved, lane: int) -> Sample:
    return _named(draw(), part, lane)


def _named(sample: Sample, part: Interleaved, lane: int) -> Sample:
    if part.names:
        sample["__source__"] = part.names[lane]
    return sample


@dataclass(frozen=True)
class StreamSettings:
    """Settings shared by the streams of a dataset."""

    sessions: SessionPool
    manifest: Manifest
    deal: Deal
    pipeline: Pipeline = field(default_factory=Pipeline)
    handover: Handover | None = None  # passes samples to other processes without a copy
    epochs: int | None = None  # number of epochs in the training run; None for no limit
    datasets: Mapping[bool, str] = field(default_factory=dict)  # identifiers of counted samples, of uncounted shards
    seeds: Mapping[str, int] = field(default_factory=dict)  # as in a state
    batching: tuple[int, bool] | None = None  # batch size and drop_last of the loader, if it is known

    @property
    def counted(self) -> Manifest | None:
        """The manifest, if samples are dealt; None if whole shards."""
        return self.manifest if self.deal.counted else None


class EpochStream:
    """The samples that one reader reads in an epoch, once.

    Errors of a shard or a sample go to the handler `on_error`. Raises NoDaemonError if the daemon stays away for longer
    than the session's patience.
    """

    def __init__(self, settings: StreamSettings, reader: ReaderIdentity, position: Position, on_error: Handler) -> None:
        self.position = position  # from which the stream resumes, and which it moves on
        self.read = False  # True once the last sample has been yielded
        self.is_timed = False  # True to have the time spent in the pipeline added up
        self.decoding_s = 0.0  # that time
        self.topology = reader.topology  # place of the reader among those of the job
        self.cut = settings.deal.cut(reader.topology)  # division of the epoch, or its rest, among these
        self._settings = settings
        self._reader = reader
        self._session: Session | None = None  # of the samples, once they are read
        where = f"rank {self.topology.rank}, worker {self.topology.worker}"
        self._skipped = Skipped(for_epoch(on_error), where, position.epoch, settings.deal.pass_places(position.epoch))
        self.share = self._share(0)  # the reader's own, from its beginning
        # Samples that a filter leaves out are not replaced: each of the others comes once.
        self._quota = None if settings.pipeline.filters else settings.deal.quota(reader.topology, self.share)

    def __repr__(self) -> str:
        return f"EpochStream({self.position!r}, quota={self._quota})"

    def samples(self, when_read: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """Yield the samples; `when_read` is called before the last one is, or when there are none left."""
        position, quota, pipeline = self.position, self._quota, self._settings.pipeline or None
        if quota == position.given or not self.share.segments:
            self._end(when_read)
            return
        with self._settings.sessions.borrow(self._reader) as session:
            self._session = session
            try:
                for sample in self._samples(session):
                    if sample is None:
                        self._skipped.note_barren(position.given)
                        continue
                    if pipeline is not None:
                        try:
                            if self.is_timed:
                                begun_s = monotonic()
                                sample = pipeline(sample)
                                self.decoding_s += monotonic() - begun_s
                            else:
                                sample = pipeline(sample)
                        except SampleError as exn:
                            self._skipped.skip(exn)
                            self._skipped.note_barren(position.given)
                            continue
                        if sample.__class__ is Dropped:
                            self._skipped.drop(sample)
                            self._skipped.note_barren(position.given)
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
    def taken(self) -> int:
        """Number of samples of the present share that were passed, bad ones included."""
        return self.position.taken

    @property
    def waited_s(self) -> float:
        """Time that this reader has waited for shards."""
        return 0.0 if self._session is None else self._session.waited_s

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
            ended=self._has_ended(),
        )

    def state_in_loader(self) -> ReaderState:
        """Return the reader's state, for a loader that keeps account of the end of the epoch."""
        return replace(self.state(over=self.is_over), over=False)

    @property
    def is_over(self) -> bool:
        """True if the epoch has no more batches on any rank, but for short ones that the loader drops."""
        return self._has_ended() and self.ranks_end_together()

    def _has_ended(self) -> bool:
        """Return True if this reader has no further batch, but for a short one that the loader drops."""
        size, drop_last = self._settings.batching or (1, False)
        return self.read or (self.counted and self.samples_left < (size if drop_last else 1))

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
        """Return the reader's own share, or for `time` above 0 another's, that makes up for skipped samples.

        The rest of a resumed epoch may have no good sample: after all shares of it come those of the whole epoch.
        """
        phases = self.position.phases if time < self.topology.readers else ()
        return self._settings.deal.share(self.position.epoch, time, self.topology, phases)

    def _samples(self, session: Session) -> Iterator[Sample | None]:
        """Yield the share's samples, None for skipped ones; then replacements of these from other readers' shares."""
        position, fruitless = self.position, 0
        shares = self.topology.readers * (2 if position.phases else 1)  # different ones; see `_share`
        while True:
            self._skipped.counts = not position.time
            before, whole = position.given, position.taken == 0
            share = self._share(position.time) if position.time else self.share
            yield from self._once(session, share.behind(position.taken, position.step, position.nth))
            if self._quota is None:
                return
            fruitless = fruitless + whole if position.given == before else 0
            if fruitless >= shares:
                raise self._skipped.unreadable()
            position.begin_share()

    def _once(self, session: Session, share: Share) -> Iterator[Sample | None]:
        """Read a share, part by part, so that its plan stays short in an epoch of any number of rounds."""
        shards = max(_MIN_PLANNED, len(self._settings.manifest))
        parts = share.in_parts(shards)
        part: Share | None = next(parts)
        while part is not None:
            following = next(parts, None)
            yield from self._part(session, part, self._shards_after(following, shards))
            part = following

    def _shards_after(self, following: Share | None, shards: int) -> Callable[[], Iterable[int]]:
        """Return what yields the shards of the next part, or else of the first one of the next epoch.

        The session keeps it with the plan, so it refers to no stream: in a cycle, the dataset's last reference
        would not end the session.
        """
        if following is not None:
            return following.shards
        after = self.position.epoch + 1
        if self._settings.epochs is not None and after >= self._settings.epochs:
            return tuple
        return partial(_first_shards, self._settings.deal, after, self.topology, shards)

    def _part(
        self, session: Session, share: Share, shards_after: Callable[[], Iterable[int]]
    ) -> Iterator[Sample | None]:
        manifest, view_of = self._settings.manifest, self._settings.pipeline.view
        plan = Plan.of(manifest, self.position.epoch, share.shards(), shards_after)
        session.declare(plan)
        drawn = manifest.choices is not None or any(segment.mixed for segment in share.segments)
        early, handover = False if drawn else None, self._settings.handover
        window = ShardWindow(session, plan, partial=early, handover=handover, view_of=view_of)
        reader = SampleReader(self._settings.counted, window, self.position, self._skipped.skip)
        try:
            for segment in share.segments:
                yield from reader.samples(segment)
        finally:
            window.empty()
