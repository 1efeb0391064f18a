"""Division of samples into batches of similar lengths: the fewest, or an exact number.

Every batch is padded to its longest sample, so samples of similar length belong together. Batches
are therefore runs of the samples in order of length, longest first. No other division needs fewer
batches: the batch with the longest sample holds at most `max_tokens // longest` samples. Filling
this batch with the next longest samples leaves the shortest possible samples for the other batches,
and the same argument applies to these. The functions are pure; `by_length` calls them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def min_batch_count(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the minimum number of batches for samples of these lengths.

    The padded size of a batch, its number of samples times its longest length, is at most
    `max_tokens`. Each length is from 1 to `max_tokens`.
    """
    return len(_runs(sorted(lengths, reverse=True), max_tokens))


def batches_of(lengths: Sequence[int], max_tokens: int, count: int) -> list[list[int]]:
    """Return exactly `count` batches of sample numbers, those with the longest samples first.

    The padded size of a batch is at most `max_tokens`, and at most what `count` batches need, so
    that the work is spread over all of them. Each sample is in one batch. If there are fewer
    samples than batches, the shortest sample is repeated as additional batches of one.

    Args:
        lengths: lengths of the samples, by number.
        max_tokens: the padded size that no batch may exceed.
        count: number of batches: `min_batch_count(lengths, max_tokens)` or more.
    """
    numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    longest_first = [lengths[number] for number in numbers]

    def is_enough(bound: int) -> bool:
        """Return True if `count` batches of a padded size of at most `bound` hold all samples."""
        return len(_runs(longest_first, bound)) <= count

    # The smallest padded size with which `count` batches are enough. A binary search finds it, as
    # larger sizes never need more batches.
    bound = bisect_left(range(max_tokens), True, lo=longest_first[0], key=is_enough)
    runs = _runs(longest_first, bound)

    def priority(index: int) -> tuple[bool, int]:
        """Return a key that is greatest for the run with the largest padded size.

        Runs of a single sample come last, since they cannot be halved.
        """
        run = runs[index]
        can_be_halved = len(run) > 1
        padded_size = len(run) * longest_first[run.start]
        return can_be_halved, padded_size

    # Halve the largest run until there are enough runs, or all have a single sample.
    while len(runs) < min(count, len(lengths)):
        largest = max(range(len(runs)), key=priority)
        run = runs[largest]
        half = len(run) // 2
        runs[largest : largest + 1] = [run[:half], run[half:]]

    # Repeat the last sample, which is the shortest, if there are fewer samples than batches.
    shortest = range(len(lengths) - 1, len(lengths))
    runs += [shortest] * (count - len(runs))
    return [[numbers[index] for index in run] for run in runs]


def _runs(longest_first: Sequence[int], bound: int) -> list[range]:
    """Divide samples into the fewest runs whose padded size is at most `bound`.

    Args:
        longest_first: lengths of the samples, in descending order.
        bound: maximum padded size; at least the longest length.
    """
    runs = []
    start = 0
    while start < len(longest_first):
        stop = min(start + bound // longest_first[start], len(longest_first))
        runs.append(range(start, stop))
        start = stop
    return runs
