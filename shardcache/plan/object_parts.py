"""Decisions about the parts of an object of which ranges are read. Pure.

A part is a piece of fixed size; parts are numbered from 0. `PartFiller` in the daemon and
`PartReplay` in simulations decide by these rules.
"""

from collections.abc import Iterable, Iterator

# Share of an object's parts from which the whole is fetched if no price is known. Then at most
# twice the bytes are fetched that are wanted. By time alone, a store whose first byte takes 30 ms
# and whose connections give 60 MB/s would have a share of 0.18. By the prices of bytes that leave a
# region, $0.09 per GB and $0.0004 per 1,000 requests, it is 0.98.
_SHARE_WITHOUT_PRICES = 0.5

AHEAD_DIVISOR = 8
"""The cache's size divided by this may be ranges that readers request ahead of need."""

# Consecutive parts are fetched in one request of up to this size. For more bytes, a second request
# on another connection is faster.
_MAX_REQUEST_BYTES = 4 * 1024 * 1024


def whole_share(
    percent: int | None,
    part_bytes: int,
    price_per_gb: float | None,
    price_per_1000_requests: float | None,
) -> float:
    """Return the share of an object's parts, from 0 to 1, from which its whole is fetched.

    A share that the user has set counts. Otherwise, nobody knows how many of the other parts will
    be wanted. So the whole is fetched once the parts wanted so far have cost as much as it costs:
    then no more than twice is paid of what it would have cost to know (the ski rental problem). The
    whole costs the bytes of all parts, and a request for as many parts as fit into one; each part
    that is fetched alone costs its bytes and a request.

    Args:
        percent: the share that the user has set, in percent; None for none.
        part_bytes: size of a part.
        price_per_gb: price of 10^9 bytes; None if it is not known.
        price_per_1000_requests: price of 1,000 requests; None if it is not known. If either price
            is not known, the other one says nothing.
    """
    if percent is not None:
        return percent / 100
    if price_per_gb is None or price_per_1000_requests is None:
        return _SHARE_WITHOUT_PRICES
    part_price = part_bytes / 1e9 * price_per_gb
    request_price = price_per_1000_requests / 1e3
    single_price = part_price + request_price
    if not single_price:
        return _SHARE_WITHOUT_PRICES
    return (part_price + request_price / max_parts_per_request(part_bytes)) / single_price


def is_worth_the_whole(wanted: int, count: int, max_share: float, *, may_fit: bool) -> bool:
    """Return whether to fetch an object as a whole, given the number of its wanted parts.

    Once many parts are wanted, fetching the others with them costs less than later requests for
    those would.

    Args:
        wanted: number of parts that are cached, being fetched, or about to be fetched.
        count: number of all parts of the object.
        max_share: the share of the parts, from 0 to 1, above which the whole is fetched.
        may_fit: False if the cache has no space for the whole object.
    """
    return may_fit and wanted > count * max_share


def max_parts_per_request(part_bytes: int) -> int:
    """Return the maximum number of consecutive parts that one request fetches; at least 1."""
    return max(1, _MAX_REQUEST_BYTES // part_bytes)


def runs(parts: Iterable[int], max_run: int) -> list[range]:
    """Divide part numbers into runs of consecutive numbers, each of which one request fetches.

    Returns the runs in the order in which their parts are wanted: first the run with the first of
    `parts`.

    Args:
        parts: numbers of parts, each once, in the order in which they are wanted. Ranges that
            several readers want may lie in any order.
        max_run: maximum length of a run.
    """
    places = {part: place for place, part in enumerate(parts)}
    found = _ascending_runs(sorted(places), max_run)
    return sorted(found, key=lambda run: min(places[part] for part in run))


def _ascending_runs(parts: Iterable[int], max_run: int) -> Iterator[range]:
    """Divide ascending part numbers into runs of consecutive numbers; yield each run."""
    run = range(0)
    for part in parts:
        if part == run.stop and 0 < len(run) < max_run:  # the run is not empty, and not full
            run = range(run.start, part + 1)
            continue
        if run:
            yield run
        run = range(part, part + 1)
    if run:
        yield run
