"""The order of a dataset: an endless sequence of rounds over all shards, of which each epoch is an interval. Pure.

In each round every shard comes once, in an order determined by seed and round, with its samples one after another; so
every sample has a position in the endless sequence. Ranks and workers are the subject of `deal`, the mixing of samples
from several shards that of `lanes`.

Permutations depend on their key alone: they are the same for every machine, Python version and hash seed.
"""

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

try:
    import numpy as np
except ImportError:
    _MIN_FOR_NUMPY = math.inf
else:
    _MIN_FOR_NUMPY = 1000  # numpy is slower for few numbers, and takes a third of the time for many

# Rounds kept: this epoch's and the next one's. Epochs of small datasets may span more, which are then recomputed.
_ROUNDS = 2


def permutation(size: int, key: str) -> list[int]:
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
    order: list[int] = draws.argsort(kind="stable").tolist()
    return order


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
        self._counts = counts
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
            shards = shard_order(self._counts, self._shuffle, round_key(self._shuffle, number))
            self._rounds[number] = shards, list(accumulate(self._counts[shard] for shard in shards))
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
