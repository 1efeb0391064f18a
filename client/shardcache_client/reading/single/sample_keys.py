"""Numbers of samples by their keys, in little memory."""

import difflib
from array import array
from collections.abc import Iterable
from itertools import islice

from shardcache.tarindex.spans import check_of

_SAMPLES_PER_BUCKET = 64
_CHECK_BITS = 32
# Number of keys in which a similar one is looked for.
_MAX_COMPARED = 1_000_000
# Number of keys that begin alike, of which the most similar are chosen.
_MAX_NEAR = 1_000
_MAX_SHOWN = 3


class SampleKeys:
    """Numbers of the samples that may have a key: some 17 bytes for each sample.

    Keys are compared by checks of 32 bits, so a sample may have another key: one in some billions.
    """

    def __init__(self, checks: Iterable[int], count: int) -> None:
        """Collect samples.

        Args:
            checks: of their keys, in the order of their numbers; see `tarindex.spans.check_of`.
            count: number of samples.
        """
        buckets = count // _SAMPLES_PER_BUCKET + 1
        # A sample is in the bucket of its check's remainder, as an integer of both: the check in
        # the lower bits, and the number of the sample in the higher ones.
        self._buckets = [array("Q") for _ in range(buckets)]
        for number, check in enumerate(checks):
            self._buckets[check % buckets].append(check | (number << _CHECK_BITS))

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the samples that may have a key, ascending."""
        check = check_of(key)
        mask = (1 << _CHECK_BITS) - 1
        bucket = self._buckets[check % len(self._buckets)]
        return [entry >> _CHECK_BITS for entry in bucket if entry & mask == check]


def near_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Return a few of the first million keys that are spelt nearly like `key`, nearest first."""
    # Only the keys that share the longest beginning with it are compared in full.
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
    """Return the characters with which both begin."""
    for place, (character, other_character) in enumerate(zip(one, other, strict=False)):
        if character != other_character:
            return one[:place]
    return one[: len(other)]
