"""Batches of bounded padded size from the lengths of samples: as few as possible, or a given number. Pure.

Every batch is padded to its longest sample, so samples of similar length belong together: batches are runs of the
samples in order of length. No other division needs fewer batches: the batch with the longest sample holds at most
`max_tokens // longest` samples; filling it with the next longest keeps the shortest possible samples for the rest, and
the same argument applies to those.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def fewest(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the minimum number of batches for samples of these lengths, each from 1 to `max_tokens`."""
    return len(_runs(sorted(lengths, reverse=True), max_tokens))


def batches(lengths: Sequence[int], max_tokens: int, count: int) -> list[list[int]]:
    """Return exactly `count` batches of sample numbers, those with the longest samples first.

    The padded size of a batch is at most `max_tokens`, and at most what `count` batches need, so that the work is
    spread over all of them. Each sample is in one batch. If there are fewer samples than batches, the shortest sample
    is repeated as additional batches of one.

    Args:
        lengths: from 1 to `max_tokens`; at least one.
        count: `fewest(lengths, max_tokens)` or more.
    """
    numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    longest_first = [lengths[number] for number in numbers]
    runs = _runs(longest_first, _least_bound(longest_first, max_tokens, count))
    while len(runs) < min(count, len(lengths)):
        at = max(range(len(runs)), key=lambda at: (len(runs[at]) > 1, len(runs[at]) * longest_first[runs[at].start]))
        half = len(runs[at]) // 2
        runs[at : at + 1] = [runs[at][:half], runs[at][half:]]
    repeats = [range(len(lengths) - 1, len(lengths))] * (count - len(runs))
    return [[numbers[place] for place in run] for run in runs + repeats]


def _runs(longest_first: Sequence[int], bound: int) -> list[range]:
    runs, start = [], 0
    while start < len(longest_first):
        stop = min(start + bound // longest_first[start], len(longest_first))
        runs.append(range(start, stop))
        start = stop
    return runs


def _least_bound(longest_first: Sequence[int], max_tokens: int, count: int) -> int:
    """Return the smallest padded size with which at most `count` batches are needed; larger sizes need no more."""
    return bisect_left(
        range(max_tokens), True, lo=longest_first[0], key=lambda bound: len(_runs(longest_first, bound)) <= count
    )
