"""The order of a dataset: an endless sequence of rounds over all shards, and the division of its epochs. Pure.

In each round every shard comes once, in an order determined by seed and round, with its samples one after another; so
every sample has a position in the endless sequence. `lanes` mixes samples of several shards.

Permutations depend on their key alone: they are the same for every machine, Python version and hash seed.
"""

import hashlib
import math
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from shardcache.errors import ConfigError

try:
    import numpy as np
except ImportError:
    _MIN_FOR_NUMPY = math.inf
else:
    _MIN_FOR_NUMPY = 1000  # numpy is slower for few numbers, and takes a third of the time for many

# Rounds kept: this epoch's and the next one's. Epochs of small datasets may span more, which are then recomputed.
_ROUNDS = 2


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

    def turned(self, turn: int) -> "Topology":
        """Return the place that this worker has if worker `turn` is the first whose batch is taken."""
        return replace(self, worker=(self.worker + turn) % self.workers) if turn else self


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
    def own_key(self) -> str:
        """Determines the order of the shard's samples; the same whether or not its dataset is mixed with others."""
        return f"{self.key}/{self.shard - self.first}"

    def numbers(self, count: int, *, permuted: bool) -> Sequence[int]:
        """Return the numbers in the tar of these samples, in order; the shard has `count` samples."""
        order = permutation(count, self.own_key) if permuted else range(count)
        return order[self.start : self.stop]


class Order:
    """The endless sequence of a dataset with `counts` samples in its shards; without shuffle, in their order."""

    def __init__(self, counts: Sequence[int], shuffle: Shuffle | None) -> None:
        self.samples = sum(counts)
        self._counts = array("Q", counts)
        self._shuffle = shuffle
        self._rounds: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rounds": {}}  # recomputing is faster than sending

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces between two positions of the endless sequence, in order."""
        while start < stop and self.samples:
            number, begin = divmod(start, self.samples)
            end = min(self.samples, begin + stop - start)
            yield from self._pieces_of_round(number, begin, end)
            start += end - begin

    def _pieces_of_round(self, number: int, begin: int, end: int) -> Iterator[Piece]:
        shards, ends = self._round(number)
        key = round_key(self._shuffle, number)
        at = bisect_right(ends, begin)
        while begin < end:
            shard, first = shards[at], ends[at] - self._counts[shards[at]]
            stop = min(ends[at], end)
            if stop > begin:
                yield Piece(shard, key, begin - first, stop - first)
            begin, at = stop, at + 1

    def _round(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shards of a round in order, and the position in the round at which each one ends."""
        if number not in self._rounds:
            while len(self._rounds) >= _ROUNDS:
                del self._rounds[next(iter(self._rounds))]
            shards = array("I", shard_order(self._counts, self._shuffle, round_key(self._shuffle, number)))
            if len(shards) < _MIN_FOR_NUMPY:
                ends = array("Q", accumulate(map(self._counts.__getitem__, shards)))
            else:
                ends = array("Q", np.take(self._counts, shards).cumsum().tobytes())
            self._rounds[number] = shards, ends
        return self._rounds[number]


def round_key(shuffle: Shuffle | None, *numbers: int) -> str:
    """Return the key of a round, which is identified by one number or several."""
    return "/".join(map(str, (shuffle.seed if shuffle else 0, *numbers)))


def shard_order(weights: Sequence[int], shuffle: Shuffle | None, key: str) -> Sequence[int]:
    """Return the shards' numbers in the order of the round with this key; groups have equal weight."""
    if shuffle is None:
        return range(len(weights))
    if shuffle.groups == 1:
        return permutation(len(weights), key)
    groups = _groups(weights, shuffle)
    return [group[place] for number, group in enumerate(groups) for place in permutation(len(group), f"{key}:{number}")]


def _groups(weights: Sequence[int], shuffle: Shuffle) -> list[list[int]]:
    """Divide the shards by the seed alone: the same groups in every round, with weights that differ by one shard."""
    groups: list[list[int]] = [[] for _ in range(shuffle.groups)]
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

    def worker_sizes(self, samples: int, rank: int) -> list[int]:
        """Return `size` for each worker of a rank."""
        return [self.size(samples, rank * self.workers + worker) for worker in range(self.workers)]

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
