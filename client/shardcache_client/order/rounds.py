"""The order of a dataset: an endless sequence of rounds over all shards, and the division of its epochs. Pure.

In each round every shard comes once, in an order determined by seed and round, with its samples one after another; so
every sample has a position in the endless sequence. `lanes` mixes samples of several shards.

Permutations depend on their key alone: they are the same for every machine, Python version and hash seed.
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
from typing import Any, Literal, NamedTuple

from shardcache.errors import ConfigError

try:
    import numpy as np
except ImportError:
    _MIN_FOR_NUMPY = math.inf
else:
    _MIN_FOR_NUMPY = 1000  # numpy is slower for few numbers, and takes a third of the time for many

# Rounds kept: this epoch's and the next one's, and more where they are small, since several spans or sources of an
# epoch are in different rounds. Others are computed again.
_MIN_ROUNDS = 2
_MAX_ROUNDS = 64
_MAX_KEPT_SHARDS = 2_000_000  # of 12 bytes each


def permutation(size: int, key: str) -> Sequence[int]:
    """Return the numbers below `size` in an order determined by the key.

    They are sorted by random numbers of the Mersenne Twister (`random.random`, whose sequence for an integer seed
    Python promises to keep, unlike that of `shuffle`), seeded with the key's BLAKE2b hash (RFC 7693).
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    source = random.Random(int.from_bytes(digest, "little"))
    if size < _MIN_FOR_NUMPY:
        draw = source.random
        return sorted(range(size), key=[draw() for _ in range(size)].__getitem__)
    # The same numbers, from the same words: two of 32 bits give one of 53, the upper 27 of the first and 26 of the
    # second.
    words = np.frombuffer(source.randbytes(8 * size), "<u4").astype(np.uint64)
    draws = words[0::2] >> 5 << 26 | words[1::2] >> 6
    # Sorting the highest bits with the number behind them is much faster than `argsort`, as long as they all differ.
    bits = (size - 1).bit_length()
    both = np.sort(draws >> max(0, 53 + bits - 64) << bits | np.arange(size, dtype=np.uint64))
    distinct = (np.diff(both >> bits) > 0).all()
    order = both & (1 << bits) - 1 if distinct else draws.argsort(kind="stable")
    return array("I", order.astype(np.uint32).tobytes())


@dataclass(frozen=True, slots=True)
class Topology:
    """One reader: a DataLoader worker of a rank, or the rank's own process as its only worker.

    Ranks are numbered across all nodes. Raises ConfigError if `rank` is out of range.
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
    """Shuffle options of a dataset."""

    seed: int = 0  # the same on all ranks
    window: int = 8  # maximum number of shards whose samples are mixed; 0 keeps the samples of a shard in file order
    # Number of fixed groups of shards. A round goes through one group after another, so that a node, which reads the
    # same part of each round, mostly meets the same shards again.
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of one shard that one reader reads in one round."""

    shard: int  # number of the shard in the manifest
    key: str  # key of the round
    start: int = 0
    stop: int | None = None  # None for all samples of an uncounted shard
    first: int = 0  # number in the manifest of the first shard of this shard's dataset; not 0 if several are mixed

    @property
    def samples(self) -> int:
        """Number of these samples, if the shard is counted."""
        return (self.stop or 0) - self.start

    @property
    def own_key(self) -> str:
        """Determines the order of the shard's samples; the same whether or not its dataset is mixed with others."""
        return f"{self.key}/{self.shard - self.first}"

    def numbers(self, count: int, *, permuted: bool) -> Sequence[int]:
        """Return the numbers in the tar of these samples, in order; the shard has `count` samples."""
        order = permutation(count, self.own_key) if permuted else range(count)
        return order[self.start : self.stop]


class Pieces(Sequence[Piece]):
    """Pieces that follow each other, found by number, or by the place of a sample."""

    @abstractmethod
    def __getitem__(self, number: int) -> Piece:  # type: ignore[override]  # no slices
        """Return a piece. Raises IndexError."""

    @abstractmethod
    def before(self, number: int) -> int:
        """Return the number of samples before a piece; of all, before the one after the last."""

    @abstractmethod
    def holding(self, place: int) -> int:
        """Return the number of the piece that has the sample at a place, the number of pieces if none has it."""

    @abstractmethod
    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards of the pieces from one number to another."""


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
        """Yield the shards of the pieces from one number to another."""
        return (piece.shard for piece in self._pieces[start:stop])


class _Round(NamedTuple):
    """One round of a dataset, without its empty shards."""

    key: str
    shards: Sequence[int]  # in order
    ends: Sequence[int]  # position in the round at which each of them ends

    def start(self, nth: int) -> int:
        """Return the position at which the nth shard begins."""
        return self.ends[nth - 1] if nth else 0


class Order:
    """The endless sequence of a dataset with `counts` samples in its shards; without shuffle, in their order.

    Each round has the same shards, so that any piece of the sequence is found without those before it.
    """

    def __init__(self, counts: Sequence[int], shuffle: Shuffle | None) -> None:
        self.samples = sum(counts)
        self._counts = array("Q", counts)
        self._filled = len(counts) - counts.count(0)
        self._shuffle = shuffle
        few = min(_MAX_ROUNDS, _MAX_KEPT_SHARDS // max(1, len(counts)))
        self._kept_rounds = max(_MIN_ROUNDS, few)
        self._rounds: dict[int, _Round] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rounds": {}}  # recomputing is faster than sending

    def pieces(self, start: int, stop: int, first: int = 0) -> Pieces:
        """Return the pieces between two positions of the endless sequence, in order.

        Takes the same time and memory for any number of them. `first` is the number of the first shard in the manifest.
        """
        return _Stretch(self, start, stop if self.samples else start, first)

    def number_at(self, position: int) -> int:
        """Return the number, in the endless sequence, of the shard that has the sample at a position."""
        number, begin = divmod(position, self.samples)
        return number * self._filled + bisect_right(self._round(number).ends, begin)

    def start_of(self, number: int) -> int:
        """Return the position at which the shard of this number in the endless sequence begins."""
        round_number, nth = divmod(number, self._filled)
        return round_number * self.samples + self._round(round_number).start(nth)

    def shard_of(self, number: int) -> tuple[int, str]:
        """Return the shard of this number in the endless sequence, and the key of its round."""
        round_number, nth = divmod(number, self._filled)
        found = self._round(round_number)
        return found.shards[nth], found.key

    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards from one number in the endless sequence to another."""
        while start < stop:
            round_number, nth = divmod(start, self._filled)
            some = self._round(round_number).shards[nth : nth + stop - start]
            yield from some
            start += len(some)

    def size_of(self, shard: int) -> int:
        """Return the number of samples of a shard."""
        return self._counts[shard]

    def _round(self, number: int) -> _Round:
        found = self._rounds.get(number)
        if found is None:
            while len(self._rounds) >= self._kept_rounds:
                del self._rounds[next(iter(self._rounds))]
            found = self._rounds[number] = self._new_round(number)
        return found

    def _new_round(self, number: int) -> _Round:
        key = round_key(self._shuffle, number)
        shards = array("I", shard_order(self._counts, self._shuffle, key))
        if self._filled < len(shards):
            shards = array("I", filter(self._counts.__getitem__, shards))
        if len(shards) < _MIN_FOR_NUMPY:
            ends = array("Q", accumulate(map(self._counts.__getitem__, shards)))
        else:
            ends = array("Q", np.take(self._counts, shards).cumsum().tobytes())
        return _Round(key, shards, ends)


class _Stretch(Pieces):
    """The pieces between two positions of an order, made when they are asked for."""

    def __init__(self, order: Order, start: int, stop: int, first: int) -> None:
        self._order = order
        self._start = start
        self._stop = stop
        self._first = first
        is_empty = start >= stop
        self._begin = 0 if is_empty else order.number_at(start)
        self._end = 0 if is_empty else order.number_at(stop - 1) + 1

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, number: int) -> Piece:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard, key = self._order.shard_of(self._begin + number)
        begin = self._order.start_of(self._begin + number)
        start = max(0, self._start - begin)
        stop = min(self._order.size_of(shard), self._stop - begin)
        return Piece(self._first + shard, key, start, stop, self._first)

    def before(self, number: int) -> int:
        """Return the number of samples before a piece."""
        if number == 0:
            return 0
        if number == len(self):
            return self._stop - self._start
        return self._order.start_of(self._begin + number) - self._start

    def holding(self, place: int) -> int:
        """Return the number of the piece that has the sample at a place."""
        if place >= self._stop - self._start:
            return len(self)
        return self._order.number_at(self._start + place) - self._begin

    def shards(self, start: int, stop: int) -> Iterator[int]:
        """Yield the shards of the pieces from one number to another."""
        numbers = self._order.shards(self._begin + start, self._begin + stop)
        return (self._first + number for number in numbers) if self._first else numbers


def round_key(shuffle: Shuffle | None, *numbers: int) -> str:
    """Return the key of a round, which is identified by one number or several."""
    return "/".join(map(str, (shuffle.seed if shuffle else 0, *numbers)))


def shard_order(weights: Sequence[int], shuffle: Shuffle | None, key: str) -> Sequence[int]:
    """Return the shards' numbers in the order of the round with this key; groups have equal weight."""
    if shuffle is None:
        return range(len(weights))
    if shuffle.groups == 1:
        return permutation(len(weights), key)
    groups = sorted(_groups(weights, shuffle).items())
    return [group[place] for number, group in groups for place in permutation(len(group), f"{key}:{number}")]


def _groups(weights: Sequence[int], shuffle: Shuffle) -> dict[int, list[int]]:
    """Divide the shards by the seed alone: the same groups in every round, with weights that differ by one shard.

    Returns the shards of each group that has any, by its number: there may be far fewer shards than groups.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    total, before = max(1, sum(weights)), 0
    for shard in permutation(len(weights), f"{shuffle.seed}:groups"):
        middle = 2 * before + weights[shard]
        groups[min(middle * shuffle.groups // (2 * total), shuffle.groups - 1)].append(shard)
        before += weights[shard]
    return groups


# Division into equal spans, for ranks and for the workers of each rank.
#
# Every sample belongs to one rank, and ranks own equally many, but for one. If they are to read equally many, the ranks
# that own fewer read their last sample twice ("pad"), or those that own more leave their last out ("drop"). Either
# comes at the very end of a rank's span, in the last batch of its last worker. So ranks that have taken equally many
# batches have padded or dropped nothing until each has read all of its span, however often the rest is divided again
# before: of an epoch, only the last division does, at most one sample fewer than it has ranks.
#
# When a job resumes with other ranks or workers, the rests of its readers' spans are concatenated and divided again. So
# a phase of an epoch is fully described by how it was divided and how far each reader came; an epoch may have any
# number of phases.

Even = Literal["pad", "drop"] | None
"""Policy for a number of samples not divisible by the ranks: "pad" repeats at most `world_size - 1` samples, as many
as PyTorch's DistributedSampler; "drop" leaves out at most as many; None gives some ranks one sample more."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Division of a sequence among the readers of a job: consecutive spans, rank by rank and worker by worker.

    Readers have the numbers `rank * workers + worker`.
    """

    world_size: int
    workers: int
    even: Even = "pad"
    batch_size: int = 1  # workers' spans are whole batches of this size, except for the rank's last batch

    @property
    def readers(self) -> int:
        """Number of spans, one per reader."""
        return self.world_size * self.workers

    def rank_size(self, samples: int, rank: int) -> int:
        """Return the number of samples that a rank reads of a sequence of `samples`."""
        if self.even is None:
            start, stop = self._own(samples, rank)
            return stop - start
        return samples // self.world_size if self.even == "drop" else -(-samples // self.world_size)

    def own(self, samples: int, reader: int) -> tuple[int, int]:
        """Return start and stop of the samples that a reader owns of a sequence of `samples`."""
        rank, worker = divmod(reader, self.workers)
        start, stop = self._own(samples, rank)
        end = stop if worker + 1 == self.workers else start + self._before(samples, rank, worker + 1)
        return min(start + self._before(samples, rank, worker), stop), end

    def spans(self, samples: int, reader: int) -> list[tuple[int, int]]:
        """Return start and stop of what a reader reads: of its own samples, and of the rank's last one as padding."""
        start, stop = self.own(samples, reader)
        size, last = self.size(samples, reader), (stop - 1) % max(1, samples)
        return [(start, min(stop, start + size)), (last, max(last, last + size - (stop - start)))]

    def size(self, samples: int, reader: int) -> int:
        """Return the number of samples that a reader reads of a sequence of `samples`."""
        rank, worker = divmod(reader, self.workers)
        return self._before(samples, rank, worker + 1) - self._before(samples, rank, worker)

    def batches(self, samples: int, rank: int, *, drop_last: bool = False) -> int:
        """Return the number of batches that a rank makes of a sequence, with the short one unless it is dropped."""
        size = self.rank_size(samples, rank)
        return size // self.batch_size if drop_last else -(-size // self.batch_size)

    def _own(self, samples: int, rank: int) -> tuple[int, int]:
        return samples * rank // self.world_size, samples * (rank + 1) // self.world_size

    def _before(self, samples: int, rank: int, worker: int) -> int:
        """Return the number of samples that a rank's workers before this one read: whole batches."""
        batches = self.batches(samples, rank)
        return min(batches * worker // self.workers * self.batch_size, self.rank_size(samples, rank))


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an epoch read by the same readers."""

    cut: Partition  # division of the samples that were left at its start
    # Number of samples of its span that each reader has passed; one per worker if it is the same on each rank.
    taken: tuple[int, ...]
    # Per reader, samples after those that it has passed as well: bits, in hexadecimal, with bit n for the n-th sample.
    beyond: tuple[str, ...] = ()  # empty if there are none


Stretch = tuple[int, int, int]
"""A first-phase reader, and start and stop of some samples of its span, in the order in which that reader reads it."""


def what_is_left(samples: int, phases: Sequence[Phase], cut: Partition) -> "Rest":
    """Return the rest of an epoch of `samples` samples after the finished phases, to be cut by `cut`."""
    rest = Rest(_spans(samples, phases[0].cut if phases else cut))
    for phase in phases:
        rest = Rest(_behind(rest, phase))
    return rest


def _spans(samples: int, cut: Partition) -> Iterator[Stretch]:
    for reader in range(cut.readers):
        start, stop = cut.own(samples, reader)
        yield reader, 0, stop - start


def _behind(rest: "Rest", phase: Phase) -> Iterator[Stretch]:
    """Yield the samples that the readers of a phase have not reached, with those that would have been dropped."""
    for reader in range(phase.cut.readers):
        start, stop = phase.cut.own(len(rest), reader)
        taken = phase.taken[reader % len(phase.taken)]
        passed = int(phase.beyond[reader] or "0", 16) if phase.beyond else 0
        for begin, end in _gaps(start + taken, stop, passed):
            yield from rest.between(begin, end)


def _gaps(start: int, stop: int, passed: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of places from `start` to `stop` not passed yet; bit n of `passed` is place `start + n`."""
    while passed and start < stop:
        left = (passed & -passed).bit_length() - 1  # places before the next passed one
        yield start, min(start + left, stop)
        start, passed = start + left, passed >> left
        run = (~passed & (passed + 1)).bit_length() - 1
        start, passed = start + run, passed >> run
    yield start, stop


class Rest:
    """The rest of an epoch: stretches, concatenated."""

    def __init__(self, parts: Iterable[Stretch]) -> None:
        self._parts = [(reader, start, stop) for reader, start, stop in parts if start < stop]
        self._ends = list(accumulate(stop - start for _, start, stop in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield the stretches between two places."""
        while start < stop:
            at = bisect_right(self._ends, start)
            reader, _, part_stop = self._parts[at]
            first, end = self._ends[at] - part_stop, min(self._ends[at], stop)
            yield reader, start - first, end - first
            start = end
