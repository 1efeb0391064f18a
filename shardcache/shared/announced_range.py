"""The ranges that a reader announces by messages of type `plan_ranges`; see `protocol`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

from shardcache.shared.exceptions import ProtocolError
from shardcache.shared.protocol import is_count

MAX_ANNOUNCED = 8192
"""Maximum number of ranges in one message: the event loop stands still while they are checked."""


class AnnouncedRange(NamedTuple):
    """A range that a reader will read, from the byte `start` to the byte `beyond`.

    Attributes:
        number: number of the range in the reader's order.
        position: position of the object in the plan.
    """

    number: int
    position: int
    start: int
    beyond: int


def announced_ranges(numbers: Sequence[object]) -> list[AnnouncedRange]:
    """Return the ranges in a message of type `plan_ranges`. Raises ProtocolError."""
    if len(numbers) > 4 * MAX_ANNOUNCED:
        raise ProtocolError(f"a 'plan_ranges' has at most {MAX_ANNOUNCED} ranges")
    if len(numbers) % 4 or not all(map(is_count, numbers)):
        raise ProtocolError("'ranges' are four numbers for each range")
    counts = cast("Sequence[int]", numbers)
    ranges = [AnnouncedRange(*counts[at : at + 4]) for at in range(0, len(counts), 4)]
    if any(later.number < earlier.number for earlier, later in pairwise(ranges)):
        raise ProtocolError("the numbers of announced ranges must not decrease")
    return ranges
