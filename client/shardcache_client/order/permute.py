"""Permutations that depend on their key alone: the same for every machine, Python version and hash seed. Pure."""

from __future__ import annotations

import hashlib
import math
import random

try:
    import numpy as np
except ImportError:
    _LEAST_FOR_NUMPY = math.inf
else:
    _LEAST_FOR_NUMPY = 1000  # numpy is slower for few numbers, and takes a third of the time for many


def permutation(size: int, key: str) -> list[int]:
    """Return the numbers below `size` in an order determined by the key.

    They are sorted by random numbers of the Mersenne Twister (`random.random`, whose sequence for an integer seed
    Python promises to keep, unlike that of `shuffle`), seeded with the key's BLAKE2b hash (RFC 7693).
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    source = random.Random(int.from_bytes(digest, "little"))
    if size >= _LEAST_FOR_NUMPY:
        return _by_numpy(size, source)
    draw = source.random
    return sorted(range(size), key=[draw() for _ in range(size)].__getitem__)


def _by_numpy(size: int, source: random.Random) -> list[int]:
    """Return the sort order of `source`'s next random numbers, built from the same words as `random.random` uses.

    Two words of 32 bits give a number of 53 bits: the upper 27 of the first, the upper 26 of the second.
    """
    words = np.frombuffer(source.randbytes(8 * size), "<u4").astype(np.uint64)
    draws = words[0::2] >> 5 << 26 | words[1::2] >> 6
    order: list[int] = draws.argsort(kind="stable").tolist()
    return order
