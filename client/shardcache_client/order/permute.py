"""Permutations that depend on their key alone: the same on every machine, Python and hash seed. Pure."""

from __future__ import annotations

import hashlib
import random


def permutation(size: int, key: str) -> list[int]:
    """Return the numbers below `size` in an order that belongs to the key.

    They are sorted by random numbers: those of the Mersenne Twister (`random.random`, whose sequence for an integer
    seed Python promises to keep, as it does not for `shuffle`), seeded by the key's BLAKE2b (RFC 7693).
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    draw = random.Random(int.from_bytes(digest, "little")).random
    return sorted(range(size), key=[draw() for _ in range(size)].__getitem__)
