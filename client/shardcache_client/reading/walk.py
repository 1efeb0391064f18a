"""Iteration over the samples of the shards that a reader holds: in file order, or mixed."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardcache.errors import (
    CapacityError,
    DiskFullError,
    OriginError,
    SampleError,
    ShardError,
    ShardTimeoutError,
)
from shardcache_client.order.share import Leg
from shardcache_client.reading.cutting import Sample
from shardcache_client.reading.hands import Hands
from shardcache_client.reading.passage import Passage
from shardcache_client.reading.tally import Tally

# Errors of a single shard. Any other would affect the next shard as well, so the handler is not called.
_SHARD_ERRORS = (OriginError, ShardError, CapacityError, DiskFullError, ShardTimeoutError)


def read(leg: Leg, counts: Sequence[int] | None, hands: Hands, tally: Tally) -> Iterator[Sample]:
    """Yield the samples of a leg; errors go to the tally's handler.

    Args:
        counts: number of samples in each shard of the manifest, if samples are dealt; else None.
    """
    if leg.mix.window:
        return iter(Mixture(leg, counts, hands, tally))
    return read_in_order(leg, counts, hands, tally)


def read_in_order(leg: Leg, counts: Sequence[int] | None, hands: Hands, tally: Tally) -> Iterator[Sample]:
    """Read a leg whose pieces come one after another in file order; also from files that are still arriving."""
    for beat, first, last in leg.beats():
        piece = leg.mix.pieces[beat]
        tally.begin_beat(beat, first)
        stop = piece.stop if last is None else piece.start + last
        passage = hands.take(None if counts is None else counts[piece.shard], (piece.start + first, stop))
        try:
            passage.open()
            hands.ask(1)
            yield from _samples(passage, tally)
        except _SHARD_ERRORS as exn:
            tally.skip(exn)
            tally.taken += 0 if stop is None else stop - passage.number
        finally:
            hands.give_back(passage)


def _samples(passage: Passage, tally: Tally) -> Iterator[Sample]:
    while True:
        try:
            for sample in passage.samples():
                tally.taken += 1
                yield sample
            return
        except SampleError as exn:
            tally.taken += 1
            tally.skip(exn)


# Limit on open requests: the daemon stops reading from a session with too many, and a wide window needs many shards.
_AT_ONCE = 8


class _LostError(Exception):
    """The sample's shard could not be opened, and the handler has been called for it."""


@dataclass(frozen=True, slots=True)
class _InHand:
    """A piece that the reader holds.

    Attributes:
        numbers: the piece's samples, as numbers in the shard, in the order in which they are spread over beats.
        cut: returns a sample by its number.
    """

    passage: Passage
    numbers: Sequence[int]
    cut: Callable[[int], Sample]


class Mixture:
    """The samples of a leg whose pieces are each permuted, then mixed. Iterable once."""

    def __init__(self, leg: Leg, counts: Sequence[int] | None, hands: Hands, tally: Tally) -> None:
        self._leg = leg
        self._counts = counts
        self._hands = hands
        self._tally = tally
        self._in_hand: dict[int, _InHand] = {}

    def __repr__(self) -> str:
        return f"Mixture(in_hand={sorted(self._in_hand)}, {self._hands!r})"

    def __iter__(self) -> Iterator[Sample]:
        for beat, first, last in self._leg.beats():
            self._tally.begin_beat(beat, first)
            self._enter(beat)
            yield from self._samples(self._draws(beat, first, last))
            self._leave(beat)
        self._leave(self._leg.mix.beats)

    def _samples(self, draws: Sequence[Callable[[], Sample]]) -> Iterator[Sample]:
        tally = self._tally
        for draw in draws:
            tally.taken += 1
            try:
                sample = draw()
            except SampleError as exn:
                tally.skip(exn)
            except _LostError:
                pass
            else:
                yield sample

    def _enter(self, beat: int) -> None:
        """Open the pieces of this beat that are not held yet, and request the next one ahead."""
        new = [piece for piece in self._leg.mix.in_hand(beat) if piece not in self._in_hand]
        for waiting, piece in zip(range(len(new), 0, -1), new, strict=True):
            self._hands.ask(min(waiting, _AT_ONCE))
            self._in_hand[piece] = self._open(piece)
        self._hands.ask(1)

    def _open(self, number: int) -> _InHand:
        piece = self._leg.mix.pieces[number]
        count = None if self._counts is None else self._counts[piece.shard]
        passage = self._hands.take(count)
        try:
            passage.open()
            count, cut = len(passage), passage.cutter()
        except _SHARD_ERRORS as exn:
            self._tally.skip(exn)
            cut = _cut_lost
        # Four bytes per number, so that held pieces take hardly any memory, however wide the window.
        return _InHand(passage, array("I", piece.numbers(count or 0, permuted=True)), cut)

    def _draws(self, beat: int, first: int, last: int | None) -> list[Callable[[], Sample]]:
        """Return the samples of a beat in order, as functions to be called once each."""
        mix = self._leg.mix
        in_hand = [(piece, self._in_hand[piece]) for piece in mix.in_hand(beat)]
        parts = [mix.part(piece, beat, held.numbers) for piece, held in in_hand]
        order = mix.interleaved(beat, [len(part) for part in parts])
        passed = Counter(order[:first])
        # Unlike a generator, `map` continues after an exception of its function.
        draws = [
            map(held.cut, part[passed[place] :]).__next__
            for place, ((_, held), part) in enumerate(zip(in_hand, parts, strict=True))
        ]
        return [draws[place] for place in order[first:last]]

    def _leave(self, beat: int) -> None:
        """Release the pieces that are in no later beat."""
        staying = self._leg.mix.in_hand(beat + 1)
        for piece in [piece for piece in self._in_hand if piece not in staying]:
            self._hands.give_back(self._in_hand.pop(piece).passage)


def _cut_lost(_number: int) -> Sample:
    raise _LostError
