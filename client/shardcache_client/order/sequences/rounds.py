"""The order of a dataset: an endless sequence of rounds over all shards. Pure.

In each round every shard comes once, in an order determined by seed and round, with its samples one
after another.

- A position is the number of a sample in the endless sequence, from 0.
- An occurrence is a shard in one of the rounds. Occurrences are numbered in the order of the
  sequence, from 0; empty shards have none.
- A piece is the part of one shard that lies between two positions.

`dealing` cuts the sequence into spans for the readers, and `mixes` has the mixed orders of several
pieces' samples.

With shards of 4, 2 and 3 samples, a round has 9 samples. If round 0 has the shards 1, 2, 0 and
round 1 has 2, 0, 1, the occurrences 0 to 5 begin at the positions 0, 2, 5, 9, 12 and 16. The
positions 7 to 11 are two pieces: samples 2 and 3 of shard 0 in round 0, and all of shard 2 in the
next.
"""

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from shardcache_client.order.sequences.permutations import (
    MIN_FOR_NUMPY,
    Shuffle,
    permutation,
    round_key,
    shard_order,
)

# Number of rounds that an order keeps in memory. At least the rounds of this epoch and the next are
# kept. More are kept where rounds are small: an epoch of a mixture may have many rounds of a small
# source, and spans that are read side by side are in different ones. Others are computed again.
_MIN_ROUNDS = 2
_MAX_ROUNDS = 64
_MAX_KEPT_SHARDS = 2_000_000  # in all kept rounds; a shard takes 12 bytes in each


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of one shard that one reader reads in one round.

    Attributes:
        shard: number of the shard in the manifest.
        key: key of the round; see `round_key`.
        start: place of the first of these samples in the order of the shard's samples.
        stop: place after the last of them; None for all samples of an uncounted shard.
        first_shard: number in the manifest of the first shard of this shard's dataset; not 0 if
            several datasets are mixed.
    """

    shard: int
    key: str
    start: int = 0
    stop: int | None = None
    first_shard: int = 0

    @property
    def samples(self) -> int:
        """Number of samples of the piece; meaningless if the shard is not counted."""
        return (self.stop or 0) - self.start

    @property
    def order_key(self) -> str:
        """Key of the order of the shard's samples in this round.

        It is the same whether or not the shard's dataset is mixed with others.
        """
        return f"{self.key}/{self.shard - self.first_shard}"

    def numbers(self, count: int, *, permuted: bool) -> Sequence[int]:
        """Return the numbers in the tar of the piece's samples, in order.

        Args:
            count: number of samples of the whole shard.
            permuted: True if the samples of the shard come in random order, False for file order.
        """
        order: Sequence[int] = range(count)
        if permuted:
            order = permutation(count, self.order_key)
        return order[self.start : self.stop]


class Pieces(Sequence[Piece]):
    """Pieces that follow each other, found by number or by the place of a sample.

    The place of a sample is its number among the samples of all these pieces, from 0.
    """

    @abstractmethod
    def __getitem__(self, number: int) -> Piece:  # type: ignore[override]  # no slices
        """Return a piece. Raises IndexError."""

    @abstractmethod
    def before(self, number: int) -> int:
        """Return the number of samples before a piece.

        Args:
            number: number of the piece. The number of pieces is allowed, and gives all samples.
        """

    @abstractmethod
    def number_at(self, place: int) -> int:
        """Return the number of the piece that has the sample at a place.

        For a place beyond the last sample, this is the number of pieces.
        """

    @abstractmethod
    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards of the pieces from number `start` to `stop`."""


class ListedPieces(Pieces):
    """Pieces in a list."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = list(pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Piece:  # type: ignore[override]
        return self._pieces[number]

    @cached_property
    def _starts(self) -> list[int]:
        """Number of samples before each piece; at last, the number of all samples."""
        return list(accumulate((piece.samples for piece in self._pieces), initial=0))

    def before(self, number: int) -> int:
        """Return the number of samples before a piece."""
        return self._starts[number]

    def number_at(self, place: int) -> int:
        """Return the number of the piece that has the sample at a place."""
        if place >= self._starts[-1]:
            return len(self)
        return bisect_right(self._starts, place) - 1

    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards of the pieces from number `start` to `stop`."""
        return (piece.shard for piece in self._pieces[start:stop])


class _Round(NamedTuple):
    """One round of a dataset, without its empty shards.

    Attributes:
        key: key of the round; see `round_key`.
        shards: numbers of the shards, in the order of the round.
        ends: position in the round, in samples, at which each shard ends.
    """

    key: str
    shards: Sequence[int]
    ends: Sequence[int]

    def start(self, nth: int) -> int:
        """Return the position in the round at which the nth shard begins."""
        return self.ends[nth - 1] if nth else 0


class Order:
    """The endless sequence of a dataset's samples.

    Each round has the same number of samples, so that any piece of the sequence is found without
    computing the rounds before it.

    Args:
        counts: number of samples of each shard.
        shuffle: None for rounds in the order of the shards.

    Attributes:
        samples: number of samples of a round.
    """

    def __init__(self, counts: Sequence[int], shuffle: Shuffle | None) -> None:
        self.samples = sum(counts)
        self._counts = array("Q", counts)
        self._shards_per_round = len(counts) - counts.count(0)
        self._shuffle = shuffle
        fitting_rounds = _MAX_KEPT_SHARDS // max(1, len(counts))
        self._kept_rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, fitting_rounds))
        self._rounds: dict[int, _Round] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Computing the rounds again in another process is faster than sending them.
        return self.__dict__ | {"_rounds": {}}

    def pieces(self, start: int, stop: int, first_shard: int = 0) -> Pieces:
        """Return the pieces between two positions of the endless sequence, in order.

        This takes the same time and memory for any number of pieces.

        Args:
            start: position of the first sample.
            stop: position after the last.
            first_shard: number of the dataset's first shard in the manifest.
        """
        if not self.samples:
            stop = start  # rounds of an empty dataset have no positions, so there are no pieces
        return _LazyPieces(self, start, stop, first_shard)

    def occurrence_at(self, position: int) -> int:
        """Return the number of the occurrence that has a position."""
        round_number, offset = divmod(position, self.samples)
        nth = bisect_right(self._round(round_number).ends, offset)
        return round_number * self._shards_per_round + nth

    def start_of(self, occurrence: int) -> int:
        """Return the position at which an occurrence begins."""
        round_number, nth = divmod(occurrence, self._shards_per_round)
        return round_number * self.samples + self._round(round_number).start(nth)

    def shard_of(self, occurrence: int) -> tuple[int, str]:
        """Return the shard of an occurrence, and the key of its round."""
        round_number, nth = divmod(occurrence, self._shards_per_round)
        its_round = self._round(round_number)
        return its_round.shards[nth], its_round.key

    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards of the occurrences from number `start` to `stop`."""
        while start < stop:
            round_number, nth = divmod(start, self._shards_per_round)
            shards = self._round(round_number).shards[nth : nth + stop - start]
            yield from shards
            start += len(shards)

    def size_of(self, shard: int) -> int:
        """Return the number of samples of a shard."""
        return self._counts[shard]

    def _round(self, number: int) -> _Round:
        """Return a round, which is computed unless it is kept."""
        kept = self._rounds.get(number)
        if kept is not None:
            return kept

        while len(self._rounds) >= self._kept_rounds:
            oldest = next(iter(self._rounds))
            del self._rounds[oldest]
        new = self._new_round(number)
        self._rounds[number] = new
        return new

    def _new_round(self, number: int) -> _Round:
        """Compute a round: the order of its shards without empty shards, and each shard's end."""
        key = round_key(self._shuffle, number)
        shards = array("I", shard_order(self._counts, self._shuffle, key))
        has_empty_shards = self._shards_per_round < len(shards)
        if has_empty_shards:
            shards = array("I", filter(self._counts.__getitem__, shards))

        if len(shards) < MIN_FOR_NUMPY:
            ends = array("Q", accumulate(map(self._counts.__getitem__, shards)))
        else:
            import numpy as np

            ends = array("Q", np.take(self._counts, shards).cumsum().tobytes())
        return _Round(key, shards, ends)


class _LazyPieces(Pieces):
    """The pieces between two positions of an order, each made when it is asked for.

    For the arguments, see `Order.pieces`.
    """

    def __init__(self, order: Order, start: int, stop: int, first_shard: int) -> None:
        self._order = order
        self._start = start
        self._stop = stop
        self._first_shard = first_shard
        # Each piece is an occurrence, or a part of one. These are the numbers of the first piece's
        # occurrence, and of the one after the last piece's.
        self._first_occurrence = 0
        self._end_occurrence = 0
        if start < stop:
            self._first_occurrence = order.occurrence_at(start)
            self._end_occurrence = order.occurrence_at(stop - 1) + 1

    def __len__(self) -> int:
        return self._end_occurrence - self._first_occurrence

    def __getitem__(self, number: int) -> Piece:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        occurrence = self._first_occurrence + number
        shard, key = self._order.shard_of(occurrence)
        shard_start = self._order.start_of(occurrence)
        return Piece(
            shard=self._first_shard + shard,
            key=key,
            start=max(0, self._start - shard_start),
            stop=min(self._order.size_of(shard), self._stop - shard_start),
            first_shard=self._first_shard,
        )

    def before(self, number: int) -> int:
        """Return the number of samples before a piece."""
        # The first and the last piece may be parts of their occurrences.
        if number == 0:
            return 0
        if number == len(self):
            return self._stop - self._start
        return self._order.start_of(self._first_occurrence + number) - self._start

    def number_at(self, place: int) -> int:
        """Return the number of the piece that has the sample at a place."""
        if place >= self._stop - self._start:
            return len(self)
        return self._order.occurrence_at(self._start + place) - self._first_occurrence

    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards of the pieces from number `start` to `stop`."""
        shards = self._order.shards(self._first_occurrence + start, self._first_occurrence + stop)
        if not self._first_shard:
            return shards
        return (self._first_shard + shard for shard in shards)
