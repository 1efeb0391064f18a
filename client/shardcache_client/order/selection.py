"""Selections: the samples of each shard that a dataset consists of, where it leaves some out. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol, TypeAlias

from shardcache.errors import ConfigError
from shardcache_client.order.proportions import Proportions
from shardcache_client.order.rounds import permutation

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
        bits: bit n, from the lowest of the first byte on, is 1 if sample n is chosen.
    """

    count: int
    bits: bytes

    @classmethod
    def of(cls, marks: Sequence[object]) -> Marked | None:
        """Build from a truth value for each sample; None if all are true."""
        count = sum(map(bool, marks))
        if count == len(marks):
            return None
        if not count:
            return NO_SAMPLES
        digits = "".join("1" if mark else "0" for mark in reversed(marks))
        return cls(count, int(digits, 2).to_bytes(-(-len(marks) // 8), "little"))

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        digits = reversed(format(int.from_bytes(self.bits, "little"), "b"))
        return [number for number, digit in enumerate(digits) if digit == "1"]


NO_SAMPLES = Marked(0, b"")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples drawn at random: those from place `start` on in the permutation of all that a key determines."""

    start: int
    count: int
    samples: int
    key: str

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        return sorted(permutation(self.samples, self.key)[self.start : self.start + self.count])


@dataclass(frozen=True, slots=True)
class Within:
    """A choice among the samples of another choice, which it counts from 0."""

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


def narrowed(outer: Choices, inner: Choices) -> Choices:
    """Return the choices `inner` among the samples that `outer` chooses."""
    return tuple(map(_narrowed, outer, inner))


def _narrowed(outer: Choice | None, inner: Choice | None) -> Choice | None:
    if outer is None or inner is None:
        return inner or outer
    return Within(outer, inner) if inner.count else NO_SAMPLES


def subset(counts: Sequence[int], numbers: Iterable[int]) -> Choices:
    """Return the choice of samples by their numbers in the dataset, whatever their order; negative ones from its end.

    Args:
        counts: number of samples in each shard.

    Raises IndexError for a number out of range.
    """
    ends = list(accumulate(counts))
    total = ends[-1] if ends else 0
    wanted: dict[int, set[int]] = {}
    for number in numbers:
        if not -total <= number < total:
            raise IndexError(f"sample {number} of a dataset with {total} samples")
        shard = bisect_right(ends, number % total)
        wanted.setdefault(shard, set()).add(number % total - ends[shard] + counts[shard])
    return tuple(_marked(count, wanted.get(shard, ())) for shard, count in enumerate(counts))


def _marked(count: int, wanted: Iterable[int]) -> Choice | None:
    marks = bytearray(count)
    for number in wanted:
        marks[number] = 1
    return Marked.of(marks)


def split(counts: Sequence[int], fractions: Sequence[float], seed: int, by: By) -> list[Choices]:
    """Return the choices of the parts of a split: together all samples, each in one part.

    By samples, the parts are as large as the fractions say, to the sample. Each gets its fraction of every shard, with
    an error of at most one sample, or below four if there are more than two parts; which ones is random. By shards,
    each shard goes to one part, in random order, so the sizes differ from the fractions by up to a shard.

    Raises ConfigError for fractions that do not add up to 1, and for a part that would be empty.
    """
    if (
        not fractions
        or not all(0 < fraction <= 1 for fraction in fractions)
        or not math.isclose(sum(fractions), 1, rel_tol=1e-6)
    ):
        raise ConfigError(f"the fractions of the split are {fractions}", remedy="give some above 0 whose sum is 1")
    total = sum(counts)
    ends = [round(total * end) for end in accumulate(fractions)]
    ends[-1] = total
    parts = _by_samples(counts, ends, seed) if by == "samples" else _by_shards(counts, ends, seed)
    for part, (choices, fraction) in enumerate(zip(parts, fractions, strict=True)):
        if not any(count if choice is None else choice.count for choice, count in zip(choices, counts, strict=True)):
            raise ConfigError(
                f"part {part} of the split, {fraction:g} of {total} samples in {len(counts)} shards, is empty",
                remedy='give it a larger fraction; or split by="samples"',
            )
    return parts


def _by_samples(counts: Sequence[int], ends: Sequence[int], seed: int) -> list[Choices]:
    sizes = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
    turns = Proportions(sizes)
    parts: list[list[Choice | None]] = [[] for _ in sizes]
    place, before = 0, turns.before(0)
    for shard, count in enumerate(counts):
        place += count
        after = turns.before(place)
        start = 0
        for part, size in enumerate(each - earlier for each, earlier in zip(after, before, strict=True)):
            key = f"split/{seed}/{shard}"
            parts[part].append(None if size == count else Drawn(start, size, count, key) if size else NO_SAMPLES)
            start += size
        before = after
    return [tuple(part) for part in parts]


def _by_shards(counts: Sequence[int], ends: Sequence[int], seed: int) -> list[Choices]:
    part_of = [0] * len(counts)
    before = 0
    for shard in permutation(len(counts), f"split/{seed}"):
        part_of[shard] = min(bisect_right(ends, before + counts[shard] // 2), len(ends) - 1)
        before += counts[shard]
    return [tuple(None if each == part else NO_SAMPLES for each in part_of) for part in range(len(ends))]
