"""The order of a dataset: every shard round after round, without end, and which part of it an epoch is. Pure.

In each round the shards come once, in an order that belongs to (seed, round), and the samples of each shard one after
another; so every sample has a position in the endless sequence. An epoch is an interval of it. Nothing here knows of
ranks or workers, see `partition`, or mixes samples of several shards, see `mix`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardcache_client.order.permute import permutation

# This epoch's and the next one's; with few samples an epoch may touch more, which are then made several times.
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How a dataset is shuffled.

    Attributes:
        seed: the same on all ranks.
        window: samples of at most so many shards are mixed; 0 leaves those of a shard in the order of the file.
        groups: to how many groups the shards are dealt once and for all. A round goes through one group after another,
            so that a node, which reads the same part of each round, mostly meets the shards that it met before.
    """

    seed: int = 0
    window: int = 8
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of one shard that are read by the same reader in the same round.

    Attributes:
        shard: its number in the manifest.
        key: to which the order of the shard's samples belongs.
        start, stop: which of the samples, counted in that order; `stop` is None for all, in a shard whose samples were
            not counted yet.
    """

    shard: int
    key: str
    start: int = 0
    stop: int | None = None

    def numbers(self, count: int, *, permuted: bool) -> Sequence[int]:
        """Return which samples of the shard these are, in order, by their numbers in the tar; it has `count`."""
        order = permutation(count, f"{self.key}/{self.shard}") if permuted else range(count)
        return order[self.start : self.stop]


class Order:
    """The endless sequence of a dataset whose samples are counted.

    Args:
        counts: samples of each shard of the manifest, 0 included.
        shuffle: None for the manifest's own order in every round.
    """

    def __init__(self, counts: Sequence[int], shuffle: Shuffle | None) -> None:
        self.samples = sum(counts)
        self._counts = counts
        self._shuffle = shuffle
        self._rounds: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def __repr__(self) -> str:
        return f"Order(shards={len(self._counts)}, samples={self.samples}, {self._shuffle!r})"

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return what lies between two positions of the endless sequence, in its order."""
        return list(self._pieces(start, stop)) if self.samples else []

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        while start < stop:
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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rounds": {}}  # made anew sooner than sent

    def _round(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shards of a round in order, and the position in the round behind each one's last sample."""
        if number not in self._rounds:
            while len(self._rounds) >= _ROUNDS:
                del self._rounds[next(iter(self._rounds))]
            self._rounds[number] = self._make_round(number)
        return self._rounds[number]

    def _make_round(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        shards = shard_order(self._counts, self._shuffle, round_key(self._shuffle, number))
        return shards, list(accumulate(self._counts[shard] for shard in shards))


def round_key(shuffle: Shuffle | None, *numbers: int) -> str:
    """Return the key of one round; a round is told by a number, or by several."""
    return "/".join(map(str, (shuffle.seed if shuffle else 0, *numbers)))


def shard_order(weights: Sequence[int], shuffle: Shuffle | None, key: str) -> Sequence[int]:
    """Return the shards' numbers in the order of the round with that key.

    Args:
        weights: samples of each shard, or 1 for each where they are not known; groups are equally heavy.
    """
    if shuffle is None:
        return range(len(weights))
    if shuffle.groups == 1:
        return permutation(len(weights), key)
    groups = _groups(weights, shuffle)
    return [group[place] for number, group in enumerate(groups) for place in permutation(len(group), f"{key}:{number}")]


def _groups(weights: Sequence[int], shuffle: Shuffle) -> list[list[int]]:
    """Deal the shards by the seed alone: the same in every round, in parts whose weights differ by a shard's."""
    dealt = permutation(len(weights), f"{shuffle.seed}:groups")
    groups: list[list[int]] = [[] for _ in range(shuffle.groups)]
    total = max(1, sum(weights))
    before = 0
    for shard in dealt:
        middle = 2 * before + weights[shard]
        groups[min(middle * shuffle.groups // (2 * total), shuffle.groups - 1)].append(shard)
        before += weights[shard]
    return groups
