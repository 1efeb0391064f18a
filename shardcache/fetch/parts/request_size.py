"""Size of a request, in parts: larger requests cost less, smaller ones reach more connections. Pure."""

from __future__ import annotations

MOST_PARTS = 4
"""Maximum number of parts of one request."""

# A shard may become urgent meanwhile, and a request that fails is repeated.
_REQUEST_S = 1.0


def parts_per_request(missing: int, connections: int, part_s: float | None) -> int:
    """Return the number of parts that each request of a download should fetch.

    Args:
        missing: parts that the download still has to fetch.
        connections: the download's share of the connections; none of them should stay idle.
        part_s: time in which a connection fetches a part; None if unknown.
    """
    if part_s is None:
        return 1
    return max(1, min(missing // connections, int(_REQUEST_S / part_s), MOST_PARTS))
