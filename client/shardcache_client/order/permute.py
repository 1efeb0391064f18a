"""Permutations that depend on their key alone: the same on every machine, Python and hash seed. Pure."""

from __future__ import annotations

import hashlib
import math
import random

try:
    import numpy as np
except ImportError:
    _LEAST_FOR_NUMPY = math.inf
else:
    _LEAST_FOR_NUMPY = 1000  # it takes longer for few numbers, and a third of the time for many


def permutation(size: int, key: str) -> list[int]:
    """Return the numbers below `size` in an order that belongs to the key.

    They are sorted by random numbers: those of the Mersenne Twister (`random.random`, whose sequence for an integer
    seed Python promises to keep, as it does not for `shuffle`), seeded by the key's BLAKE2b (RFC 7693).
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    source = random.Random(int.from_bytes(digest, "little"))
    if size >= _LEAST_FOR_NUMPY:
        return _by_numpy(size, source)
    draw = source.random
    return sorted(range(size), key=[draw() for _ in range(size)].__getitem__)


def _by_numpy(size: int, source: random.Random) -> list[int]:
    """Return the order of `source`'s next random numbers, made of the same words of the twister as `random` makes them.

    Two words of 32 bits give a number of 53: the upper 27 of the first, the upper 26 of the second.
    """
    words = np.frombuffer(source.randbytes(8 * size), "<u4").astype(np.uint64)
    draws = words[0::2] >> 5 << 26 | words[1::2] >> 6
    order: list[int] = draws.argsort(kind="stable").tolist()
    return order
