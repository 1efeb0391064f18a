"""The daemon's counters since start."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Plain numbers, written only from the event loop.

    Attributes:
        origin_bytes: bytes received from stores, those of failed tries included.
        origin_requests: requests sent to stores.
        hits: leases granted from what was already published.
        misses: leases that had to wait for a transfer.
        evictions: published shards removed, to make room or by `evict`.
        regrets: shards fetched again that had been removed to make room.
        retries: parts asked for again.
        hedges: parts asked for a second time because the first request for them was late.
        hedged_bytes: bytes received by whichever of such two requests was not needed; within `origin_bytes`.
        corrupt: shards found damaged, at arrival or by `verify`.
    """

    origin_bytes: int = 0
    origin_requests: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    regrets: int = 0
    retries: int = 0
    hedges: int = 0
    hedged_bytes: int = 0
    corrupt: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
