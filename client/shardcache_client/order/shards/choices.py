"""Choices of samples among those of shards: by number, at random, within other choices. Pure."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol, TypeAlias

from shardcache.errors import ConfigError
from shardcache_client.arguments.values import shown
from shardcache_client.order.sequences.rounds import permutation
from shardcache_client.order.sequences.turns import Proportions

By = Literal["samples", "shards"]


class Choice(Protocol):
    """Some samples of one shard. Immutable; its `repr` tells it from any other choice."""

    @property
    def count(self) -> int:
        """Number of samples chosen."""

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the samples in the tar, ascending."""


Choices: TypeAlias = tuple[Choice | None, ...]
"""A choice for each shard of a manifest, None for all of its samples."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Samples with a bit each.

    Attributes:
        count: number of samples chosen.
        bits: bit n, from the lowest of the first byte on, is 1 if sample n is chosen.
    """

    count: int
    bits: bytes

    @classmethod
    def of(cls, marks: Sequence[object]) -> "Marked | None":
        """Build from a truth value for each sample; None if all are true."""
        count = sum(map(bool, marks))
        if count == len(marks):
            return None
        if count == 0:
            return NO_SAMPLES

        highest_first = "".join("1" if mark else "0" for mark in reversed(marks))
        size_bytes = -(-len(marks) // 8)
        bits = int(highest_first, 2).to_bytes(size_bytes, "little")
        return cls(count, bits)

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        highest_first = format(int.from_bytes(self.bits, "little"), "b")
        digits = reversed(highest_first)
        return [number for number, digit in enumerate(digits) if digit == "1"]


NO_SAMPLES = Marked(0, b"")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples drawn at random: all of a shard are permuted, and `count` in a row are taken.

    Attributes:
        start: place of the first of them in the permutation.
        count: number of samples drawn.
        samples: number of samples of the shard.
        key: determines the permutation.
    """

    start: int
    count: int
    samples: int
    key: str

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        order = permutation(self.samples, self.key)
        return sorted(order[self.start : self.start + self.count])


@dataclass(frozen=True, slots=True)
class Within:
    """A choice among the samples of another choice: `inner` numbers those of `outer` from 0."""

    outer: Choice
    inner: Choice

    @property
    def count(self) -> int:
        """Number of samples chosen."""
        return self.inner.count

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        outer = self.outer.numbers()
        return [outer[number] for number in self.inner.numbers()]


def narrowed(outer: Choice | None, inner: Choice | None) -> Choice | None:
    """Return a choice among the samples of another one; None for all of a shard."""
    if outer is None:
        return inner
    if inner is None:
        return outer
    if not inner.count:
        return NO_SAMPLES
    return Within(outer, inner)


def subset(counts: Sequence[int], numbers: Iterable[int]) -> Choices:
    """Return the choice of samples by number; negative ones count from the end.

    Raises IndexError if one is out of range.

    Args:
        counts: number of samples of each shard.
        numbers: of samples of all shards together, in any order.
    """
    ends = list(accumulate(counts))
    total = ends[-1] if ends else 0
    marks: dict[int, bytearray] = {}
    for number in numbers:
        if not -total <= number < total:
            raise IndexError(f"sample {shown(number)} of a dataset with {total} samples")
        from_begin = number % total
        shard = bisect_right(ends, from_begin)
        if shard not in marks:
            marks[shard] = bytearray(counts[shard])
        first_of_shard = ends[shard] - counts[shard]
        marks[shard][from_begin - first_of_shard] = 1

    choices: list[Choice | None] = [NO_SAMPLES] * len(counts)
    for shard, marked in marks.items():
        choices[shard] = Marked.of(marked)
    return tuple(choices)


def split(counts: Sequence[int], fractions: Sequence[float], seed: int, by: By) -> list[Choices]:
    """Return the choices of the parts of a split: together all samples, each in one part.

    By samples, the parts are as large as the fractions say, to the sample. Each gets its fraction
    of every shard, to within one sample for two parts, and to within less than four for more; the
    samples are drawn at random. By shards, each shard goes to one part, in random order, so the
    sizes differ from the fractions by up to a shard.

    Raises ConfigError for fractions that do not add up to 1, and for a part that would be empty.

    Args:
        counts: number of samples of each shard.
        fractions: of each part.
        seed: determines which samples or shards each part gets.
        by: "samples" or "shards".
    """
    are_fractions = all(0 < fraction <= 1 for fraction in fractions)
    is_whole = math.isclose(sum(fractions), 1, rel_tol=1e-6)
    if not are_fractions or not is_whole:
        raise ConfigError(
            f"a dataset cannot be split into the fractions {fractions}",
            remedy="give fractions above 0 whose sum is 1",
        )

    total = sum(counts)
    ends = [round(total * end) for end in accumulate(fractions[:-1])]
    ends.append(total)
    if by == "samples":
        parts = _by_samples(counts, ends, seed)
    else:
        parts = _by_shards(counts, ends, seed)

    for part, (choices, fraction) in enumerate(zip(parts, fractions, strict=True)):
        if not _samples_in(choices, counts):
            raise ConfigError(
                f"part {part} of the split, {fraction:g} of {total} samples in {len(counts)} "
                "shards, is empty",
                remedy='give it a larger fraction; or split by="samples"',
            )
    return parts


def _samples_in(choices: Choices, counts: Sequence[int]) -> int:
    """Return the number of samples chosen in all shards."""
    each = zip(choices, counts, strict=True)
    return sum(count if choice is None else choice.count for choice, count in each)


def _by_samples(counts: Sequence[int], ends: Sequence[int], seed: int) -> list[Choices]:
    """Return the choices of parts that share every shard, given where they end in all samples."""
    sizes = tuple(stop - start for start, stop in pairwise((0, *ends)))
    # Deals all samples to the parts one by one, so that every stretch of them is divided evenly.
    turns = Proportions(sizes)
    parts: list[list[Choice | None]] = [[] for _ in ends]
    for shard, (first, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        count = stop - first
        start = 0
        each = zip(parts, turns.before(first), turns.before(stop), strict=True)
        for part, before, after in each:
            size = after - before
            if size == count:
                part.append(None)  # all of the shard, which may be empty
            elif size == 0:
                part.append(NO_SAMPLES)
            else:
                part.append(Drawn(start, size, count, f"split/{seed}/{shard}"))
            start += size
    return [tuple(part) for part in parts]


def _by_shards(counts: Sequence[int], ends: Sequence[int], seed: int) -> list[Choices]:
    """Return the choices of parts of whole shards, given where they should end in all samples."""
    parts: list[list[Choice | None]] = [[NO_SAMPLES] * len(counts) for _ in ends]
    last = len(ends) - 1
    before = 0
    for shard in permutation(len(counts), f"split/{seed}"):
        # A shard belongs to the part that has its middle.
        middle = before + counts[shard] // 2
        part = min(bisect_right(ends, middle), last)
        parts[part][shard] = None
        before += counts[shard]
    return [tuple(part) for part in parts]
