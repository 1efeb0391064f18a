"""Choices: the samples of each shard that a dataset keeps, if it does not keep all. Pure.

A choice is some samples of one shard. `subset` makes the choices for samples given by number.
`split` divides a dataset at random into parts, for example for training and validation, and makes
the choices of each part. Choices may be made among the samples of other choices.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol, TypeAlias

from shardcache.shared.exceptions import ConfigError
from shardcache_client.arguments.values import shown
from shardcache_client.order.sequences.lane_turns import Proportions
from shardcache_client.order.sequences.permutations import permutation

# The unit in which `split` divides: every shard is divided, or each goes to one part as a whole.
By = Literal["samples", "shards"]


class Choice(Protocol):
    """Some samples of one shard. Immutable.

    The `repr` identifies the choice: it is different for any other choice.
    """

    @property
    def count(self) -> int:
        """Number of samples chosen."""

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the samples in the tar, ascending."""


Choices: TypeAlias = tuple[Choice | None, ...]
"""A choice for each shard of a manifest; None for a shard all of whose samples are chosen."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A choice with one bit for each sample of the shard.

    Attributes:
        count: number of samples chosen.
        bits: bit n is 1 if sample n is chosen; bit 0 is the lowest bit of the first byte.
    """

    count: int
    bits: bytes

    @classmethod
    def of(cls, marks: Sequence[object]) -> "Marked | None":
        """Build from a truth value for each sample. Returns None, for all samples, if all are."""
        count = sum(map(bool, marks))
        if count == len(marks):
            return None
        if count == 0:
            return NO_SAMPLES

        # In a text of binary digits, the digit of sample 0 comes last.
        highest_first = "".join("1" if mark else "0" for mark in reversed(marks))
        size_bytes = -(-len(marks) // 8)
        bits = int(highest_first, 2).to_bytes(size_bytes, "little")
        return cls(count, bits)

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        highest_first = format(int.from_bytes(self.bits, "little"), "b")
        digits = reversed(highest_first)
        return [number for number, digit in enumerate(digits) if digit == "1"]


# The choice of a shard none of whose samples are chosen.
NO_SAMPLES = Marked(0, b"")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples drawn at random: all samples of a shard are permuted, and a range is taken.

    Attributes:
        start: place of the first drawn sample in the permutation.
        count: number of samples drawn, which are consecutive in the permutation.
        samples: number of samples of the shard.
        key: determines the permutation; see `permutation`.
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
    """A choice among the samples of another choice.

    Attributes:
        outer: the samples among which some are chosen.
        inner: the choice, as numbers of the samples of `outer` from 0.
    """

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
    """Return the choice of `inner` among the samples of `outer`; None means all samples."""
    if outer is None:
        return inner
    if inner is None:
        return outer
    if not inner.count:
        return NO_SAMPLES
    return Within(outer, inner)


def subset(counts: Sequence[int], numbers: Iterable[int]) -> Choices:
    """Return the choices of samples by number. Raises IndexError if a number is out of range.

    Args:
        counts: number of samples of each shard.
        numbers: numbers of the samples among those of all shards, in any order. Negative numbers
            count from the end.
    """
    ends = list(accumulate(counts))
    total = ends[-1] if ends else 0
    marks: dict[int, bytearray] = {}
    for number in numbers:
        if not -total <= number < total:
            raise IndexError(f"sample {shown(number)} of a dataset with {total} samples")
        place = number % total  # the same for a negative number, which counts from the end
        shard = bisect_right(ends, place)
        if shard not in marks:
            marks[shard] = bytearray(counts[shard])
        first_of_shard = ends[shard] - counts[shard]
        marks[shard][place - first_of_shard] = 1

    choices: list[Choice | None] = [NO_SAMPLES] * len(counts)
    for shard, marked in marks.items():
        choices[shard] = Marked.of(marked)
    return tuple(choices)


def split(counts: Sequence[int], fractions: Sequence[float], seed: int, by: By) -> list[Choices]:
    """Return the choices of each part of a split. Every sample is in exactly one part.

    A split by samples gives each part its fraction of all samples, rounded to a whole number. It
    also gives each part its fraction of every shard, to within one sample for two parts, and to
    within less than four for more parts: `Proportions` errs by half of this at each end of a shard.
    The samples are drawn at random.

    A split by shards gives each shard to one part, in random order. So the size of a part differs
    from its fraction by up to a shard.

    Raises ConfigError for fractions that do not add up to 1, and for a part that would be empty.

    Args:
        counts: number of samples of each shard.
        fractions: fraction of all samples for each part.
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
    ends.append(total)  # exact, even if the sum of the fractions is not quite 1
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
    """Return the choices of parts that each get some samples of every shard.

    Args:
        counts: number of samples of each shard.
        ends: number of samples of each part and all parts before it together.
        seed: see `split`.
    """
    sizes = tuple(stop - start for start, stop in pairwise((0, *ends)))
    # All samples are dealt to the parts in turns, so that every range of them is divided evenly.
    turns = Proportions(sizes)
    parts: list[list[Choice | None]] = [[] for _ in ends]
    for shard, (first, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        count = stop - first
        drawn = 0  # number of the shard's samples that earlier parts have got
        each = zip(parts, turns.before(first), turns.before(stop), strict=True)
        for part, before, after in each:
            size = after - before
            if size == count:
                # The part gets all samples of the shard, which may be an empty shard.
                part.append(None)
            elif size == 0:
                part.append(NO_SAMPLES)
            else:
                part.append(Drawn(drawn, size, count, f"split/{seed}/{shard}"))
            drawn += size
    return [tuple(part) for part in parts]


def _by_shards(counts: Sequence[int], ends: Sequence[int], seed: int) -> list[Choices]:
    """Return the choices of parts that consist of whole shards; see `_by_samples`."""
    parts: list[list[Choice | None]] = [[NO_SAMPLES] * len(counts) for _ in ends]
    last = len(ends) - 1
    before = 0
    for shard in permutation(len(counts), f"split/{seed}"):
        # The shards are laid end to end, by samples. A shard belongs to the part that its middle
        # falls into. The middle of an empty shard may be the end of the last part.
        middle = before + counts[shard] // 2
        part = min(bisect_right(ends, middle), last)
        parts[part][shard] = None
        before += counts[shard]
    return [tuple(part) for part in parts]
