"""The orders in which a shuffle puts shards and samples: permutations determined by keys. Pure.

A permutation depends on its key alone: it is the same for every machine, Python version and hash
seed. A round is one pass over all shards of a dataset; `rounds` has their order. A dataset is
counted if the number of samples of each shard is known before it is read.
"""

import hashlib
import math
import random
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

try:
    import numpy as np
except ImportError:
    MIN_FOR_NUMPY = math.inf
else:
    # numpy is slower for few numbers, and takes a third of the time for many.
    MIN_FOR_NUMPY = 1000


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


def permutation(size: int, key: str) -> Sequence[int]:
    """Return the numbers below `size` in an order determined by the key.

    The numbers are sorted by random numbers of the Mersenne Twister, seeded with the key's BLAKE2b
    hash (RFC 7693). The random numbers are those of `random.random`: Python promises to keep its
    sequence for an integer seed, but makes no such promise for `random.shuffle`.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    source = random.Random(int.from_bytes(digest, "little"))
    if size < MIN_FOR_NUMPY:
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
    keyed = np.sort(((draws >> dropped_bits) << place_bits) | places)
    are_distinct = (np.diff(keyed >> place_bits) > 0).all()
    if are_distinct:
        all_place_bits = (1 << place_bits) - 1
        order = keyed & all_place_bits
    else:
        order = draws.argsort(kind="stable")
    return array("I", order.astype(np.uint32).tobytes())


def round_key(shuffle: Shuffle | None, *numbers: int) -> str:
    """Return the key that determines the permutations of a round: its seed and its numbers.

    Args:
        shuffle: None if nothing is permuted.
        numbers: identify the round. Counted datasets use one number, that of the round. Uncounted
            ones use two: the epoch, and the share; see `ShardDeal.mix`.
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
