"""From samples' lengths to batches of bounded padded size, as few as can be or as many as are wanted. Pure.

Every batch is padded to its longest sample, so samples of like length belong together: batches are runs of the samples
in order of length. No batches of any other shape are fewer. The longest sample is in some batch, which holds at most
`max_tokens // longest` samples; filled up with the next longest, it leaves behind the shortest samples possible, and so
on with the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def fewest(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the least number of batches for samples of these lengths, each from 1 to `max_tokens`."""
    return len(_runs(sorted(lengths, reverse=True), max_tokens))


def batches(lengths: Sequence[int], max_tokens: int, count: int) -> list[list[int]]:
    """Return exactly `count` batches of sample numbers, those with the longest samples first.

    No batch has a padded size above `max_tokens`, nor above what `count` batches need: the work is spread over all of
    them, not left to the first. Each sample is in one batch. Where there are fewer samples than batches, the shortest
    is a batch of its own as often as it takes.

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
    """Return the least padded size with which no more than `count` batches are needed; a greater one needs no more."""
    return bisect_left(
        range(max_tokens), True, lo=longest_first[0], key=lambda bound: len(_runs(longest_first, bound)) <= count
    )
