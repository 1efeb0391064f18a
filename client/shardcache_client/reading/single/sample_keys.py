"""Numbers of samples by their keys, in little memory.

A dataset that is indexed by number finds samples by key in this way: only a hash of 32 bits is kept
of each key. `near_keys` finds similar keys for the error about a key that does not exist.
"""

import difflib
from array import array
from collections.abc import Iterable
from itertools import islice

from shardcache.shared.tarindex.spans import key_hash

_SAMPLES_PER_BUCKET = 64
_HASH_BITS = 32
# Maximum number of keys among which similar keys are looked for.
_MAX_COMPARED = 1_000_000
# Maximum number of keys whose similarity is measured.
_MAX_CANDIDATES = 1_000
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
        # The bucket of a sample is its hash modulo the number of buckets. The sample's entry there
        # is an integer with the hash in the lower 32 bits, and the number in the higher bits.
        self._buckets = [array("Q") for _ in range(buckets)]
        for number, sample_hash in enumerate(key_hashes):
            entry = sample_hash | (number << _HASH_BITS)
            self._buckets[sample_hash % buckets].append(entry)

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the samples that may have a key, ascending."""
        wanted_hash = key_hash(key)
        mask = (1 << _HASH_BITS) - 1
        bucket = self._buckets[wanted_hash % len(self._buckets)]
        return [entry >> _HASH_BITS for entry in bucket if entry & mask == wanted_hash]


def near_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that are spelt most like `key`, the most similar first.

    Only the first million keys are searched.
    """
    # Measuring the similarity of two keys is slow. So it is measured only for the keys that share
    # the longest prefix with `key`.
    longest_prefix = ""
    candidates: list[str] = []
    for other in islice(keys, _MAX_COMPARED):
        if not other.startswith(longest_prefix):
            continue
        prefix = _shared_prefix(key, other)
        if len(prefix) > len(longest_prefix):
            longest_prefix = prefix
            candidates.clear()
        if len(candidates) < _MAX_CANDIDATES:
            candidates.append(other)
    return difflib.get_close_matches(key, candidates, n=_MAX_SHOWN)


def _shared_prefix(one: str, other: str) -> str:
    """Return the longest string with which both strings begin."""
    for index, (character, other_character) in enumerate(zip(one, other, strict=False)):
        if character != other_character:
            return one[:index]
    return one[: len(other)]
