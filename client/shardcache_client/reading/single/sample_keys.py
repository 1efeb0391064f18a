"""Numbers of samples by their keys, in little memory."""

import difflib
from array import array
from collections.abc import Iterable
from itertools import islice, takewhile
from operator import eq

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

    Keys are compared by 32 bits: a sample with the number of another key is one in billions.
    """

    def __init__(self, checks: Iterable[int], count: int) -> None:
        """Collect samples.

        Args:
            checks: of their keys, in the order of their numbers; see `tarindex.spans.check_of`.
            count: number of samples.
        """
        size = count // _SAMPLES_PER_BUCKET + 1
        # By the remainder of the check: it and, in the higher bits, the number.
        self._buckets = [array("Q") for _ in range(size)]
        for number, check in enumerate(checks):
            self._buckets[check % size].append(check | (number << _CHECK_BITS))

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the samples that may have a key, ascending."""
        check = check_of(key)
        mask = (1 << _CHECK_BITS) - 1
        bucket = self._buckets[check % len(self._buckets)]
        return [each >> _CHECK_BITS for each in bucket if each & mask == check]


def near_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Return a few of the first million keys that are spelt nearly like `key`, nearest first."""
    shared = 0
    near: list[str] = []
    for each in islice(keys, _MAX_COMPARED):
        if not each.startswith(key[:shared]):
            continue
        shared_here = _shared_chars(each, key)
        if shared_here > shared:
            shared = shared_here
            near.clear()
        if len(near) < _MAX_NEAR:
            near.append(each)
    return difflib.get_close_matches(key, near, n=_MAX_SHOWN)


def _shared_chars(one: str, other: str) -> int:
    """Return the number of characters with which both begin."""
    return sum(takewhile(bool, map(eq, one, other)))
