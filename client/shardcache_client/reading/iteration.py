"""Iteration over the samples of the shards that a reader holds: in file order, or mixed.

Each place of a segment gives its sample, or None if that could not be read and the handler has skipped it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardcache.errors import (
    CapacityError,
    DiskFullError,
    OriginError,
    SampleError,
    ShardError,
    ShardTimeoutError,
)
from shardcache_client.files.slicing import Sample
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.share import Segment
from shardcache_client.reading.leased_shard import LeasedShard
from shardcache_client.reading.position import ReadingProgress
from shardcache_client.reading.shard_window import ShardWindow

# Errors of a single shard. Any other would affect the next shard as well, so the handler is not called.
_SHARD_ERRORS = (OriginError, ShardError, CapacityError, DiskFullError, ShardTimeoutError)


def read_segment(
    segment: Segment, manifest: Manifest | None, shard_window: ShardWindow, reader_position: ReadingProgress
) -> Iterator[Sample | None]:
    """Yield the samples of a segment; errors go to the position's handler.

    Args:
        manifest: the dataset's, if samples are dealt; else None.
    """
    if segment.mixed or (manifest is not None and manifest.choices is not None):
        return iter(DrawnSegment(segment, manifest, shard_window, reader_position))
    return read_in_order(segment, manifest, shard_window, reader_position)


def read_in_order(
    segment: Segment, manifest: Manifest | None, shard_window: ShardWindow, reader_position: ReadingProgress
) -> Iterator[Sample | None]:
    """Read a segment whose pieces come one after another in file order; also from files that are still arriving."""
    for step, first, last in segment.steps():
        piece = segment.mix.pieces[step]
        reader_position.begin_step(step, first)
        stop = piece.stop if last is None else piece.start + last
        leased_shard = shard_window.take(
            piece.shard, None if manifest is None else manifest[piece.shard].samples, (piece.start + first, stop)
        )
        try:
            leased_shard.open()
            shard_window.ask(1)
            yield from _samples(leased_shard, reader_position)
        except _SHARD_ERRORS as exn:
            reader_position.skip(exn)
            for _ in range(0 if stop is None else stop - leased_shard.number):
                reader_position.taken += 1
                yield None
        finally:
            shard_window.give_back(leased_shard)


def _samples(leased_shard: LeasedShard, reader_position: ReadingProgress) -> Iterator[Sample | None]:
    while True:
        try:
            for sample in leased_shard.samples():
                reader_position.taken += 1
                yield sample
            return
        except SampleError as exn:
            reader_position.taken += 1
            reader_position.skip(exn)
            yield None


# Limit on open requests: the daemon stops reading from a session with too many, and a wide window needs many shards.
_AT_ONCE = 8


Draw = Callable[[], Sample]


class _LostError(Exception):
    """The sample's shard could not be opened, and the handler has been called for it."""


def drawn(draw: Draw, reader_position: ReadingProgress) -> Sample | None:
    """Return a sample, or None if the handler skips it."""
    reader_position.taken += 1
    try:
        return draw()
    except SampleError as exn:
        reader_position.skip(exn)
    except _LostError:
        pass
    return None


@dataclass(frozen=True, slots=True)
class _HeldPiece:
    """A piece that the reader holds.

    Attributes:
        numbers: the piece's samples, as numbers in the shard, in the order in which they are spread over steps.
        cut: returns a sample by its number.
    """

    leased_shard: LeasedShard
    numbers: Sequence[int]
    cut: Callable[[int], Sample]


class DrawnSegment:
    """The samples of a segment, drawn by number: its pieces are each permuted, then mixed. Iterable once.

    Those of a selection are drawn in file order if the segment is not mixed.
    """

    def __init__(
        self, segment: Segment, manifest: Manifest | None, shard_window: ShardWindow, reader_position: ReadingProgress
    ) -> None:
        self._segment = segment
        self._manifest = manifest
        self._shard_window = shard_window
        self._reader_position = reader_position
        self._held: dict[int, _HeldPiece] = {}

    def __repr__(self) -> str:
        return f"DrawnSegment(held={sorted(self._held)}, {self._shard_window!r})"

    def __iter__(self) -> Iterator[Sample | None]:
        reader_position = self._reader_position
        for draws in self._steps():
            for draw in draws:  # as `drawn`, whose call would cost a shuffled reader a twentieth of its rate
                reader_position.taken += 1
                try:
                    sample: Sample | None = draw()
                except SampleError as exn:
                    reader_position.skip(exn)
                    sample = None
                except _LostError:
                    sample = None
                yield sample

    def draws(self) -> Iterator[Draw]:
        """Yield each sample as a function that returns it, to be called at most once and before the next is taken."""
        for draws in self._steps():
            yield from draws

    def _steps(self) -> Iterator[Iterator[Draw]]:
        """Yield the draws of each step, while its pieces are held."""
        for step, first, last in self._segment.steps():
            self._reader_position.begin_step(step, first)
            self._enter(step)
            yield self._draws(step, first, last)
            self._leave(step)
        self._leave(self._segment.mix.steps)

    def _enter(self, step: int) -> None:
        """Open the pieces of this step that are not held yet, and request the next one ahead."""
        new = [piece for piece in self._segment.mix.pieces_at(step) if piece not in self._held]
        for waiting, piece in zip(range(len(new), 0, -1), new, strict=True):
            self._shard_window.ask(min(waiting, _AT_ONCE))
            self._held[piece] = self._open(piece)
        self._shard_window.ask(1)

    def _open(self, number: int) -> _HeldPiece:
        piece = self._segment.mix.pieces[number]
        count = None if self._manifest is None else self._manifest[piece.shard].samples
        chosen = None if self._manifest is None else self._manifest.chosen(piece.shard)
        leased_shard = self._shard_window.take(piece.shard, count)
        try:
            leased_shard.open()
            count, cut = len(leased_shard), leased_shard.cutter()
        except _SHARD_ERRORS as exn:
            self._reader_position.skip(exn)
            cut = _cut_lost
        # Four bytes per number, so that held pieces take hardly any memory, however wide the window.
        numbers = piece.numbers((count or 0) if chosen is None else len(chosen), permuted=self._segment.mixed)
        if chosen is not None:
            numbers = [chosen[number] for number in numbers]
        return _HeldPiece(leased_shard, array("I", numbers), cut)

    def _draws(self, step: int, first: int, last: int | None) -> Iterator[Draw]:
        mix = self._segment.mix
        held_pieces = [(piece, self._held[piece]) for piece in mix.pieces_at(step)]
        parts = [mix.part(piece, step, held.numbers) for piece, held in held_pieces]
        order = mix.interleaved(step, [len(part) for part in parts])
        passed = Counter(order[:first])
        cuts = [held.cut for _, held in held_pieces]
        numbers = [iter(part[passed[place] :]) for place, part in enumerate(parts)]
        for place in order[first:last]:
            yield partial(cuts[place], next(numbers[place]))

    def _leave(self, step: int) -> None:
        """Release the pieces that are in no later step."""
        staying = self._segment.mix.pieces_at(step + 1)
        for piece in [piece for piece in self._held if piece not in staying]:
            self._shard_window.give_back(self._held.pop(piece).leased_shard)


def _cut_lost(_number: int) -> Sample:
    raise _LostError
