"""The order in which one reader reads its pieces of shards: the samples of a window of shards, mixed. Pure.

Time is counted in beats. One piece enters per beat, in the order of the pieces, and spreads its samples in equal parts
over `window` beats, beginning with its own; the samples of a beat come in random order. So the first sample needs only
the first shard, it is known in advance when each shard is needed, a reader never holds more than `window` shards, and
no sample waits in a buffer. Neighbours in a shard end up a third of a window's samples apart on average, in either
order.

Any beat can be computed directly from the sizes of the pieces in it, so reading can start anywhere without delay.

(MosaicML's py1e shifts each sample by a random distance and sorts; beats are the same idea with parts of equal size, so
that no beat depends on the random numbers of the others.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shardcache_client.order.permute import permutation
from shardcache_client.order.rounds import Piece


@dataclass(frozen=True)
class Mix:
    """A mixed order of pieces.

    Attributes:
        pieces: in the order in which they enter.
        window: number of beats that each piece takes part in; 0 and 1 read one piece after another, 0 in file order.
    """

    pieces: Sequence[Piece]
    window: int = 0

    @property
    def _stay(self) -> int:
        return max(1, self.window)

    @property
    def beats(self) -> int:
        """Number of beats until the last piece has left."""
        return len(self.pieces) + self._stay - 1 if self.pieces else 0

    def pieces_at(self, beat: int) -> range:
        """Return the pieces that are in a beat."""
        return range(max(0, beat - self._stay + 1), min(beat + 1, len(self.pieces)))

    def part(self, piece: int, beat: int, numbers: Sequence[int]) -> Sequence[int]:
        """Return the samples of a piece that come in a beat, in order; `numbers` are all of the piece's samples."""
        start, stop = self._part(len(numbers), beat - piece)
        return numbers[start:stop]

    def interleaved(self, beat: int, sizes: Sequence[int]) -> list[int]:
        """Return the piece of each sample of a beat, as indices into `pieces_at(beat)`.

        Args:
            sizes: sizes of the parts that come in the beat, in the order of `pieces_at`.
        """
        parts = [place for place, size in enumerate(sizes) for _ in range(size)]
        if len(sizes) <= 1:
            return parts
        return [parts[place] for place in permutation(len(parts), self._key(beat))]

    def _part(self, size: int, nth: int) -> tuple[int, int]:
        """Return the range of a piece's samples for the nth of its beats; rounded so that the first has the most."""
        return -(-size * nth // self._stay), -(-size * (nth + 1) // self._stay)

    def _key(self, beat: int) -> str:
        last = self.pieces[min(beat, len(self.pieces) - 1)]
        return f"{last.own_key}:{last.start}+{beat - len(self.pieces) if beat >= len(self.pieces) else 0}"

    # For pieces whose sizes are known

    @cached_property
    def _starts(self) -> list[int]:
        """Number of samples before each piece, and before the end."""
        return list(accumulate(((piece.stop or 0) - piece.start for piece in self.pieces), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def find(self, place: int) -> tuple[int, int]:
        """Return the beat that contains a place of the whole order, and the place's index in that beat."""
        beat = bisect_right(range(self.beats), place, key=self._come)
        return beat, place - (self._come(beat - 1) if beat else 0)

    def enters(self, piece: int) -> int:
        """Return the first place at which a piece is held."""
        return self._come(piece - 1) if piece else 0

    def _come(self, beat: int) -> int:
        """Return the number of samples up to the end of a beat: all of pieces that have left, parts of the others."""
        pieces, starts = self.pieces_at(beat), self._starts
        parts = (self._part(starts[piece + 1] - starts[piece], beat - piece)[1] for piece in pieces)
        return starts[pieces.start] + sum(parts)
