"""The order of a dataset: an endless sequence of rounds over all shards. Pure.

In each round every shard comes once, in an order determined by seed and round, with its samples one
after another. So every sample has a position in the endless sequence. A piece is the part of one
shard that lies between two positions. `dealing` cuts the sequence into spans for the readers, and
`lanes` mixes the samples of several pieces.

With shards of 4, 2 and 3 samples, a round has 9 samples. If round 0 has the shards 1, 2, 0 and
round 1 has 2, 0, 1, the shards begin at the positions 0, 2, 5, 9, 12 and 16. The positions 7 to 11
are two pieces: samples 2 and 3 of shard 0 in round 0, and all of shard 2 in round 1.

Permutations depend on their key alone: they are the same for every machine, Python version and hash
seed.
"""

import hashlib
import math
import random
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from shardcache.errors import ConfigError

try:
    import numpy as np
except ImportError:
    _MIN_FOR_NUMPY = math.inf
else:
    # numpy is slower for few numbers, and takes a third of the time for many.
    _MIN_FOR_NUMPY = 1000

# Number of rounds that an order keeps in memory. At least the rounds of this epoch and the next are
# kept. More are kept where rounds are small, since the spans or sources of an epoch may be in
# different rounds. Rounds that are not kept are computed again.
_MIN_ROUNDS = 2
_MAX_ROUNDS = 64
_MAX_KEPT_SHARDS = 2_000_000  # in all kept rounds; a shard takes 12 bytes in each


def permutation(size: int, key: str) -> Sequence[int]:
    """Return the numbers below `size` in an order determined by the key.

    The numbers are sorted by random numbers of the Mersenne Twister, seeded with the key's BLAKE2b
    hash (RFC 7693). The random numbers are those of `random.random`: Python promises to keep its
    sequence for an integer seed, but makes no such promise for `random.shuffle`.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    source = random.Random(int.from_bytes(digest, "little"))
    if size < _MIN_FOR_NUMPY:
        draw = source.random
        draws = [draw() for _ in range(size)]
        return sorted(range(size), key=draws.__getitem__)
    return _permutation_by_numpy(size, source)


def _permutation_by_numpy(size: int, source: random.Random) -> "array[int]":
    """Return the numbers below `size`, sorted by the same random numbers as `permutation` draws."""
    # `random.random` makes a number of 53 bits from two words of 32 bits: the upper 27 bits of the
    # first word, then the upper 26 bits of the second word.
    words = np.frombuffer(source.randbytes(8 * size), "<u4").astype(np.uint64)
    upper = words[0::2] >> 5
    lower = words[1::2] >> 6
    draws = upper << 26 | lower

    # Each random number is followed by its place in the lower bits of the same word. Sorting these
    # words is much faster than `argsort`. Both parts must fit into 64 bits, so the lowest bits of a
    # random number are dropped. The order is the same as long as the remaining bits all differ.
    place_bits = (size - 1).bit_length()
    dropped_bits = max(0, 53 + place_bits - 64)
    places = np.arange(size, dtype=np.uint64)
    keyed = np.sort(draws >> dropped_bits << place_bits | places)
    are_distinct = (np.diff(keyed >> place_bits) > 0).all()
    if are_distinct:
        order = keyed & (1 << place_bits) - 1
    else:
        order = draws.argsort(kind="stable")
    return array("I", order.astype(np.uint32).tobytes())


@dataclass(frozen=True, slots=True)
class Topology:
    """One reader: a DataLoader worker of a rank, or the rank's own process as its only worker.

    Raises ConfigError if `rank` is out of range.

    Attributes:
        rank: number of the rank across all nodes, from 0 to `world_size` - 1.
        world_size: number of ranks.
        worker: number of the worker in its rank, from 0 to `workers` - 1.
        workers: number of workers of each rank.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} is out of range for world_size {self.world_size}",
                remedy="ranks run from 0 to world_size - 1",
            )

    @property
    def readers(self) -> int:
        """Number of readers in the job, if every rank has as many workers as this one."""
        return self.world_size * self.workers

    @property
    def reader(self) -> int:
        """Number of this reader in the job, from 0."""
        return self.rank * self.workers + self.worker


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Shuffle options of a dataset.

    Attributes:
        seed: seed of all permutations; it must be the same on all ranks.
        window: maximum number of shards whose samples are mixed; 0 keeps the samples of a shard in
            file order, and None permutes all samples of the dataset.
        groups: number of fixed groups of shards. A round goes through one group after another. A
            node reads the same part of each round, and so mostly reads the same shards again.
    """

    seed: int = 0
    window: int | None = 8
    groups: int = 1

    @property
    def is_global(self) -> bool:
        """True if all samples of the dataset are permuted."""
        return self.window is None


def window_of(shuffle: Shuffle | None) -> int:
    """Return the maximum number of shards whose samples are mixed.

    It is 0 for file order. It is also 0 for a permutation of all samples, for which a reader does
    not hold shards.
    """
    if shuffle is None or shuffle.window is None:
        return 0
    return shuffle.window


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
    def holding(self, place: int) -> int:
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

    def holding(self, place: int) -> int:
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
            stop = start
        return _LazyPieces(self, start, stop, first_shard)

    def number_at(self, position: int) -> int:
        """Return the number in the endless sequence of the shard that has a position.

        These numbers count the shards of all rounds, from the first round on.
        """
        round_number, offset = divmod(position, self.samples)
        nth = bisect_right(self._round(round_number).ends, offset)
        return round_number * self._shards_per_round + nth

    def start_of(self, number: int) -> int:
        """Return the position at which the shard of this number in the endless sequence begins."""
        round_number, nth = divmod(number, self._shards_per_round)
        return round_number * self.samples + self._round(round_number).start(nth)

    def shard_of(self, number: int) -> tuple[int, str]:
        """Return the shard of this number in the endless sequence, and its round's key."""
        round_number, nth = divmod(number, self._shards_per_round)
        its_round = self._round(round_number)
        return its_round.shards[nth], its_round.key

    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards from number `start` to `stop` in the endless sequence."""
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
        if self._shards_per_round < len(shards):
            shards = array("I", filter(self._counts.__getitem__, shards))

        if len(shards) < _MIN_FOR_NUMPY:
            ends = array("Q", accumulate(map(self._counts.__getitem__, shards)))
        else:
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
        # Number in the endless sequence of the first piece's shard, and of the shard after the
        # last piece's.
        self._first_number = 0
        self._end_number = 0
        if start < stop:
            self._first_number = order.number_at(start)
            self._end_number = order.number_at(stop - 1) + 1

    def __len__(self) -> int:
        return self._end_number - self._first_number

    def __getitem__(self, number: int) -> Piece:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard, key = self._order.shard_of(self._first_number + number)
        shard_start = self._order.start_of(self._first_number + number)
        return Piece(
            shard=self._first_shard + shard,
            key=key,
            start=max(0, self._start - shard_start),
            stop=min(self._order.size_of(shard), self._stop - shard_start),
            first_shard=self._first_shard,
        )

    def before(self, number: int) -> int:
        """Return the number of samples before a piece."""
        if number == 0:
            return 0
        if number == len(self):
            return self._stop - self._start
        return self._order.start_of(self._first_number + number) - self._start

    def holding(self, place: int) -> int:
        """Return the number of the piece that has the sample at a place."""
        if place >= self._stop - self._start:
            return len(self)
        return self._order.number_at(self._start + place) - self._first_number

    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards of the pieces from number `start` to `stop`."""
        shards = self._order.shards(self._first_number + start, self._first_number + stop)
        if not self._first_shard:
            return shards
        return (self._first_shard + shard for shard in shards)


def round_key(shuffle: Shuffle | None, *numbers: int) -> str:
    """Return the key that determines the permutations of a round: its seed and its numbers.

    Args:
        shuffle: None if nothing is permuted.
        numbers: identify the round. Counted datasets use one number, that of the round. Uncounted
            ones use two: the epoch, and the share within the epoch.
    """
    seed = 0 if shuffle is None else shuffle.seed
    return "/".join(map(str, (seed, *numbers)))


def shard_order(weights: Sequence[int], shuffle: Shuffle | None, key: str) -> Sequence[int]:
    """Return the shards' numbers in the order of a round.

    Args:
        weights: weight of each shard, usually its number of samples. Groups get equal weights.
        shuffle: None for the order in which the shards are numbered.
        key: key of the round; see `round_key`.
    """
    if shuffle is None:
        return range(len(weights))
    if shuffle.groups == 1:
        return permutation(len(weights), key)
    order: list[int] = []
    for number, group in sorted(_groups(weights, shuffle).items()):
        order += [group[place] for place in permutation(len(group), f"{key}:{number}")]
    return order


def _groups(weights: Sequence[int], shuffle: Shuffle) -> dict[int, list[int]]:
    """Divide the shards into groups, by the seed alone: so every round has the same groups.

    Groups are of equal weight, to within a shard. Returns the shards of each group, by the group's
    number. Groups without shards are left out, since there may be far fewer shards than groups.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    total = max(1, sum(weights))
    before = 0
    for shard in permutation(len(weights), f"{shuffle.seed}:groups"):
        # All shards are laid end to end, by weight, and cut into equal groups. A shard belongs to
        # the group that has its middle.
        twice_middle = 2 * before + weights[shard]
        number = twice_middle * shuffle.groups // (2 * total)
        groups[min(number, shuffle.groups - 1)].append(shard)
        before += weights[shard]
    return groups
