"""A permutation of all samples of a dataset, of which any part is found by itself. Pure.

It is the order of `shuffle="global"`. A round is one permutation of all samples, and the rounds
follow each other endlessly. A position is the number of a sample in this endless sequence, from 0.

The samples of a round are numbered in file order, and their numbers are permuted by a Feistel
network (Luby and Rackoff, 1988): a number is cut into two halves, and each half in turn is changed
by a hash of the other half. The network permutes the numbers below a power of two. A result that is
not the number of a sample is permuted again until such a number comes ("cycle walking"; Black and
Rogaway, 2002), which takes less than one further permutation on average. For 10 samples, the
network permutes the numbers below 16, and 10 to 15 are permuted again.

So no list of samples is made or kept, however many there are, and reading can start at any position
without delay.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from shardcache_client.order.sequences.lanes import Lane, Slice
from shardcache_client.order.sequences.mixes import Mix
from shardcache_client.order.sequences.permutations import Shuffle, round_key
from shardcache_client.order.sequences.rounds import Order

try:
    import numpy as np
except ImportError:
    _HAS_NUMPY = False
else:
    _HAS_NUMPY = True

# Numbers permuted at a time. They are few, so that a batch does not wait for samples after it.
_BLOCK = 1024

# For fewer numbers than this, numpy's arrays are slower than Python's numbers.
_MIN_FOR_NUMPY = 32

# Passes through the Feistel network, each of which changes both halves. Four passes are as good as
# random for large numbers. Where there are few samples, the halves have few bits and need more.
_PASSES = 8

_LOW_32 = 0xFFFF_FFFF


class Bijection:
    """A permutation of the numbers below `size`, determined by a key.

    It is the same for every machine, Python version and hash seed, with numpy or without. A place
    is an index into the permuted numbers.

    Args:
        size: 1 or more, below 2**63.
        key: determines the permutation.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        bits = max(1, (size - 1).bit_length())
        left_bits = bits // 2
        self._right_bits = bits - left_bits
        self._left_mask = (1 << left_bits) - 1
        self._right_mask = (1 << self._right_bits) - 1
        # Each pass has two keys of four bytes, one for each half.
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _PASSES).digest()
        words = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 8 * _PASSES, 4)]
        self._keys = list(zip(words[::2], words[1::2], strict=True))

    def __repr__(self) -> str:
        return f"Bijection(size={self.size})"

    def between(self, start: int, stop: int) -> Sequence[int]:
        """Return the permuted numbers from one place to another."""
        if _HAS_NUMPY and stop - start >= _MIN_FOR_NUMPY:
            return self._array(start, stop)
        return [self._number(place) for place in range(start, stop)]

    def _number(self, place: int) -> int:
        """Return the permuted number at a place."""
        number: int = self._permuted(place)
        while number >= self.size:
            number = self._permuted(number)
        return number

    def _array(self, start: int, stop: int) -> Sequence[int]:
        """Return the permuted numbers from one place to another, computed by numpy."""
        numbers = self._permuted(np.arange(start, stop, dtype=np.uint64))
        beyond = np.flatnonzero(numbers >= self.size)
        while len(beyond):
            numbers[beyond] = self._permuted(numbers[beyond])
            beyond = beyond[numbers[beyond] >= self.size]
        permuted: list[int] = numbers.tolist()
        return permuted

    def _permuted(self, number: Any) -> Any:
        """Permute a number below the power of two, or an array of such numbers, once."""
        left = number >> self._right_bits
        right = number & self._right_mask
        for left_key, right_key in self._keys:
            left = left ^ (_hashed(right, left_key) & self._left_mask)
            right = right ^ (_hashed(left, right_key) & self._right_mask)
        return (left << self._right_bits) | right


def _hashed(value: Any, key: int) -> Any:
    """Return a hash of 32 bits for a number, or for each number in an array of 64-bit integers.

    The hash depends on each bit of the number. The multipliers are xxHash's primes. No product has
    more than 64 bits, so that arrays have the same results as Python's numbers.

    Args:
        value: the number or the array, below 2**32.
        key: 32 bits that select the hash function.
    """
    value = ((value ^ key) * 0x9E37_79B1) & _LOW_32
    value = ((value ^ value >> 15) * 0x85EB_CA77) & _LOW_32
    value = ((value ^ value >> 13) * 0xC2B2_AE3D) & _LOW_32
    return value ^ value >> 16


class ScatteredOrder:
    """The endless sequence of a dataset's rounds, each a permutation of all of its samples.

    Args:
        counts: number of samples in each shard.
        shuffle: shuffle options, of which only the seed is used.

    Attributes:
        samples: number of samples of a round.
    """

    def __init__(self, counts: Sequence[int], shuffle: Shuffle) -> None:
        self.samples = sum(counts)
        self._ends = array("Q", accumulate(counts))
        self._shuffle = shuffle

    def __repr__(self) -> str:
        return f"ScatteredOrder(samples={self.samples}, {self._shuffle})"

    def samples_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the samples between two positions of the sequence.

        Each sample is given as the number of its shard and its own number in the shard.
        """
        ends = self._ends
        while start < stop:
            round_number, begin = divmod(start, self.samples)
            end = min(self.samples, begin + min(stop - start, _BLOCK))
            permuted = Bijection(self.samples, round_key(self._shuffle, round_number))
            for sample in permuted.between(begin, end):
                shard = bisect_right(ends, sample)
                before = ends[shard - 1] if shard else 0
                yield shard, sample - before
            start += end - begin


@dataclass(frozen=True, slots=True)
class Scattered(Slice):
    """Places of a permutation of all samples of a dataset.

    Attributes:
        order: the dataset's endless sequence of permutations.
        origin: position of the sample at place 0, from which `start` and `stop` are counted.
        first_shard: number in the manifest of the dataset's first shard; not 0 if several datasets
            are mixed.
    """

    order: ScatteredOrder
    origin: int
    first_shard: int = 0

    @property
    def is_mixed(self) -> bool:
        """True: the samples of a shard do not come one after another."""
        return True

    def samples_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the samples from one place of this slice, counted from 0, to another.

        Each sample is given as the number of its shard in the manifest and its number in the shard.
        """
        first = self.origin + self.start
        samples = self.order.samples_between(first + start, first + stop)
        if not self.first_shard:
            return samples
        return ((self.first_shard + shard, number) for shard, number in samples)


EndlessOrder: TypeAlias = Order | ScatteredOrder
"""The order of a dataset's samples, one round after another."""


def order_of(counts: Sequence[int], shuffle: Shuffle | None) -> EndlessOrder:
    """Return the order of a dataset whose shards have `counts` samples."""
    if shuffle is not None and shuffle.is_global:
        return ScatteredOrder(counts, shuffle)
    return Order(counts, shuffle)


def lane_of(order: EndlessOrder, window: int, start: int, stop: int, first_shard: int = 0) -> Lane:
    """Return the samples between two positions of an order, as one reader reads them.

    Args:
        order: the order.
        window: number of shards whose samples are mixed; unused if all samples are permuted.
        start: position of the first sample.
        stop: position after the last.
        first_shard: number in the manifest of the dataset's first shard.
    """
    if isinstance(order, ScatteredOrder):
        return Scattered(0, stop - start, order, origin=start, first_shard=first_shard)
    return Mix(order.pieces(start, stop, first_shard), window)
