"""Fast checks of the numbers in a sidecar's tables.

A sidecar is the index file that the cache keeps next to a shard; its tables have numbers for each
sample and each of its members (see `tables`). All of them are checked when the sidecar is opened.
Checking them one by one would take a tenth of the time in which small samples are read. So
thousands of numbers are compared at once, by a subtraction of two large integers whose digits are
the numbers: see `_are_at_most`.
"""

import sys
from typing import TypeAlias

NumberTable: TypeAlias = memoryview  # its items are u64 or u32 numbers

_DIGITS = 8192  # numbers compared at once

# Integers with a 1 in each digit. Multiplied by a limit, they have the limit in each digit. On a
# big-endian machine, a table's first number becomes the highest digit instead of the lowest. That
# does not matter here, as all digits are the same.
_ONES_OF_64_BITS = int.from_bytes(bytes((1, 0, 0, 0, 0, 0, 0, 0)) * _DIGITS, "little")
_ONES_OF_32_BITS = int.from_bytes(bytes((1, 0, 0, 0)) * _DIGITS, "little")


def is_partition(ends: NumberTable, total: int) -> bool:
    """Return whether `ends` are the ascending ends of pieces that together have `total` items."""
    last = ends[-1] if len(ends) else 0
    return last == total and are_ranges(ends[:-1], ends[1:], total)


def are_ranges(starts: NumberTable, ends: NumberTable, limit: int) -> bool:
    """Return whether `starts[i] <= ends[i] <= limit` for every i.

    False also if any number is 2**63 or more, since no file has such an offset.
    """
    if not 0 <= limit < 1 << 63:
        return False
    for at in range(0, len(starts), _DIGITS):
        all_starts = int.from_bytes(starts[at : at + _DIGITS], sys.byteorder)
        all_ends = int.from_bytes(ends[at : at + _DIGITS], sys.byteorder)
        missing_digits = max(0, at + _DIGITS - len(starts))  # the last integers have fewer
        ones = _ONES_OF_64_BITS >> (64 * missing_digits)
        tops = ones << 63  # the top bit of each digit
        if (all_starts | all_ends) & tops:  # a start or an end is 2**63 or more
            return False
        if not _are_at_most(all_starts, all_ends, tops):
            return False
        if not _are_at_most(all_ends, ones * limit, tops):
            return False
    return True


def are_below(numbers: NumberTable, limit: int) -> bool:
    """Return whether each of these u32 numbers is less than `limit`, itself less than 2**31."""
    if not len(numbers):
        return True
    if not 0 < limit < 1 << 31:
        return False
    for at in range(0, len(numbers), _DIGITS):
        all_numbers = int.from_bytes(numbers[at : at + _DIGITS], sys.byteorder)
        missing_digits = max(0, at + _DIGITS - len(numbers))  # the last integer has fewer
        ones = _ONES_OF_32_BITS >> (32 * missing_digits)
        tops = ones << 31  # the top bit of each digit
        if all_numbers & tops:  # a number is 2**31 or more
            return False
        if not _are_at_most(all_numbers, ones * (limit - 1), tops):
            return False
    return True


def _are_at_most(numbers: int, limits: int, tops: int) -> bool:
    """Return whether no digit of `numbers` is larger than the digit of `limits` at the same place.

    The top bit of each digit is set before the subtraction. It is still set afterwards if nothing
    was borrowed from it, hence if the limit's digit is at least the number's.

    Args:
        numbers: an integer of 32-bit or 64-bit digits, whose top bits are 0.
        limits: an integer of as many digits, whose top bits are 0.
        tops: the integer with the top bit of each digit.
    """
    return ((limits | tops) - numbers) & tops == tops
