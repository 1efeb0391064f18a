"""The samples of a reader's share, from the shards that it holds: in file order, mixed, or of several lanes in turns.

Each place of a part gives its sample, or None if that could not be read and the handler has skipped it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shardcache.errors import (
    CapacityError,
    DiskFullError,
    OriginError,
    SampleError,
    ShardError,
    ShardTimeoutError,
)
from shardcache_client.files.slicing import Sample
from shardcache_client.handlers import Handler
from shardcache_client.order.lanes import Interleaved, Mix, Part, Segment, Strided
from shardcache_client.order.manifest import Manifest
from shardcache_client.position.state import Position
from shardcache_client.reading.leased_shard import LeasedShard, ShardWindow

T = TypeVar("T")
Draw = Callable[[], Sample]
"""Returns a sample; to be called at most once, and before the next draw is taken."""

# Errors of a single shard. Any other would affect the next shard as well, so the handler is not called.
_SHARD_ERRORS = (OriginError, ShardError, CapacityError, DiskFullError, ShardTimeoutError)

# Limit on open requests: the daemon stops reading from a session with too many, and a wide window needs many shards.
_MAX_AT_ONCE = 8


class StoppedError(Exception):
    """A handler has ended the epoch."""


@dataclass(slots=True)
class Skipped:
    """Handler of errors; numbers of bad samples, and of shards that could not be read, wholly or from a sample on."""

    on_error: Handler
    samples: int = 0
    shards: int = 0

    def skip(self, exn: Exception) -> None:
        """Call the handler, and count the skipped sample or shard.

        Raises StoppedError if the handler ends the epoch, or what the handler raises.
        """
        if not self.on_error(exn):
            raise StoppedError
        if isinstance(exn, SampleError):
            self.samples += 1
        else:
            self.shards += 1


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


class SampleReader:
    """Reads parts of a share through one window of shards.

    A lane takes a shard from the window when its turn needs one. A turn whose sample is skipped or not wanted is over,
    too, so the lanes take their shards in the order of the plan, whatever happens.

    Args:
        manifest: the dataset's, if samples are dealt; else None.
    """

    def __init__(
        self, manifest: Manifest | None, shard_window: ShardWindow, position: Position, skipped: Skipped
    ) -> None:
        self._manifest = manifest
        self._shard_window = shard_window
        self._position = position
        self._skip = skipped.skip

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
            leased_shard = self._shard_window.take(piece.shard, count, (piece.start + first, stop))
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

    def _steps(self, segment: Segment) -> Iterator[Iterator[Draw]]:
        """Yield the draws of each step, while its pieces are held."""
        mix, held = segment.mix, dict[int, _HeldPiece]()
        for step, first, last in segment.steps():
            self._begin_step(step, first)
            self._enter(mix, step, held)
            yield _draws(mix, step, held, first, last)
            self._leave(mix, step, held)
        self._leave(mix, mix.steps, held)

    def _enter(self, mix: Mix, step: int, held: dict[int, _HeldPiece]) -> None:
        """Open the pieces of this step that are not held yet, and request the next one ahead."""
        new = [piece for piece in mix.pieces_at(step) if piece not in held]
        for waiting, piece in zip(range(len(new), 0, -1), new, strict=True):
            self._shard_window.ask(min(waiting, _MAX_AT_ONCE))
            held[piece] = self._open(mix, piece)
        self._shard_window.ask(1)

    def _leave(self, mix: Mix, step: int, held: dict[int, _HeldPiece]) -> None:
        """Release the pieces that are in no later step."""
        staying = mix.pieces_at(step + 1)
        for piece in [piece for piece in held if piece not in staying]:
            self._shard_window.give_back(held.pop(piece).leased_shard)

    def _open(self, mix: Mix, number: int) -> _HeldPiece:
        piece = mix.pieces[number]
        count = None if self._manifest is None else self._manifest[piece.shard].samples
        chosen = None if self._manifest is None else self._manifest.chosen(piece.shard)
        leased_shard = self._shard_window.take(piece.shard, count)
        try:
            leased_shard.open()
            count, cut = len(leased_shard.whole), leased_shard.whole.cutter()
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
            for step in self._steps(part):
                yield from step
            return
        assert isinstance(part, Interleaved)
        lanes = {lane: self._draws_of(each) for lane, each in part.parts().items()}
        with closing(_in_turn(part, lanes)) as turns:
            for lane, draw in turns:
                yield partial(_draw_named, draw, part, lane)


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
