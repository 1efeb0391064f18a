"""Decisions about the parts of an object of which ranges are read. Pure."""

from collections.abc import Iterable, Iterator

AHEAD_SHARE = 8
"""An eighth of the cache may be ranges that readers ask for before they need them."""

# Neighbouring parts are one request up to this size: beyond it, another connection is faster.
_MAX_REQUEST_BYTES = 4 * 1024 * 1024


def is_worth_the_whole(wanted: int, count: int, max_share: float, *, may_fit: bool) -> bool:
    """Return whether to fetch an object as a whole, given the number of its wanted parts.

    Once many are wanted, fetching the others costs less than later requests for them.

    Args:
        wanted: number of parts that are cached, being fetched, or to be fetched now.
        count: number of all parts.
        max_share: the share of the parts above which the whole is fetched.
        may_fit: False if the cache has no space for the whole.
    """
    return may_fit and wanted > count * max_share


def max_parts_per_request(part_bytes: int) -> int:
    """Return the maximum number of neighbouring parts that one request fetches."""
    return max(1, _MAX_REQUEST_BYTES // part_bytes)


def runs(parts: Iterable[int], max_run: int) -> Iterator[range]:
    """Yield runs of ascending parts that follow each other, of at most `max_run` parts."""
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
