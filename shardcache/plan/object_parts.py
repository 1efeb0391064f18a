"""Decisions about the parts of an object of which ranges are read. Pure."""

from collections.abc import Iterable, Iterator

AHEAD_SHARE = 8
"""One in so many bytes of the cache may be ranges that readers ask for before they need them."""

# Neighbouring parts are one request up to this size: beyond it, another connection is faster.
_MAX_REQUEST_BYTES = 4 * 1024 * 1024


def max_parts(count: int, max_share: float, *, may_fit: bool) -> float:
    """Return the number of parts up to which an object is fetched by parts.

    Once more of them are wanted, the others cost less than later requests.

    Args:
        count: number of all parts.
        max_share: the share of the parts from which the whole is fetched.
        may_fit: False if the cache has no space for the whole.
    """
    if not may_fit:
        return count
    return count * max_share


def max_parts_per_request(part_bytes: int) -> int:
    """Return how many neighbouring parts one request fetches."""
    return max(1, _MAX_REQUEST_BYTES // part_bytes)


def runs(parts: Iterable[int], max_run: int) -> Iterator[range]:
    """Yield parts that follow each other, at most `max_run` at a time."""
    run = range(0)
    for part in parts:
        if part == run.stop and 0 < len(run) < max_run:
            run = range(run.start, part + 1)
            continue
        if run:
            yield run
        run = range(part, part + 1)
    if run:
        yield run
