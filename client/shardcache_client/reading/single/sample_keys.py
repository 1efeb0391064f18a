"""Numbers of samples by their keys, in little memory.

A dataset that is indexed by number uses this to find samples by key, and near keys for the error
about a key that does not exist. Of each key, only a hash of 32 bits is kept.
"""

import difflib
from array import array
from collections.abc import Iterable
from itertools import islice

from shardcache.tarindex.spans import key_hash

_SAMPLES_PER_BUCKET = 64
_HASH_BITS = 32
# Maximum number of keys among which similar keys are looked for.
_MAX_COMPARED = 1_000_000
# Maximum number of keys with the same beginning, of which the most similar are chosen.
_MAX_NEAR = 1_000
_MAX_SHOWN = 3  # number of similar keys that are returned


class SampleKeys:
    """Numbers of the samples that may have a key, in about 17 bytes of memory per sample.

    Keys are compared by hashes of 32 bits. So a sample that is found may have another key, with a
    probability of one in four billion for each comparison.
    """

    def __init__(self, key_hashes: Iterable[int], count: int) -> None:
        """Collect samples.

        Args:
            key_hashes: hashes of the samples' keys, in the order of the samples' numbers; see
                `tarindex.spans.key_hash`.
            count: number of samples.
        """
        buckets = count // _SAMPLES_PER_BUCKET + 1
        # The remainder of its hash says which bucket a sample is in. Its entry there is an integer
        # with the hash in the lower 32 bits, and the number of the sample in the higher bits.
        self._buckets = [array("Q") for _ in range(buckets)]
        for number, hashed in enumerate(key_hashes):
            self._buckets[hashed % buckets].append(hashed | (number << _HASH_BITS))

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the samples that may have a key, ascending."""
        hashed = key_hash(key)
        mask = (1 << _HASH_BITS) - 1
        bucket = self._buckets[hashed % len(self._buckets)]
        return [entry >> _HASH_BITS for entry in bucket if entry & mask == hashed]


def near_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Return a few of the first million keys that are spelt nearly like `key`, nearest first."""
    # Comparing two keys in full is slow. So only the keys that share the longest beginning with
    # `key` are compared in full.
    longest = ""
    near: list[str] = []
    for other in islice(keys, _MAX_COMPARED):
        if not other.startswith(longest):
            continue
        shared = _shared_beginning(key, other)
        if len(shared) > len(longest):
            longest = shared
            near.clear()
        if len(near) < _MAX_NEAR:
            near.append(other)
    return difflib.get_close_matches(key, near, n=_MAX_SHOWN)


def _shared_beginning(one: str, other: str) -> str:
    """Return the characters with which both strings begin."""
    for place, (character, other_character) in enumerate(zip(one, other, strict=False)):
        if character != other_character:
            return one[:place]
    return one[: len(other)]
