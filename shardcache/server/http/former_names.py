"""Names that JSON keys and metrics had before 0.1: reported by that release, too, and by no later one.

`docs/upgrading.md` lists them for users.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

METRICS = {
    "cache_leased_bytes": "cache_in_hand_bytes",
    "cache_reserved_bytes": "cache_arriving_bytes",
    "scrub_corrupt_shards": "scrub_damaged_shards",
    "refetches": "regrets",
    "origin_connections": "store_connections",
    "origin_connections_limit": "store_connections_limit",
    "origin_throttled": "store_throttled",
}
"""Former names of metrics, without prefix and suffix."""


def status(page: Json) -> Json:
    """Return a status page that has the former keys, too."""
    cache, counters, scrub = page["cache"], page["counters"], page["scrub"]
    return page | {
        "cache": cache | {"pinned_bytes": cache["leased_bytes"], "arriving_bytes": cache["reserved_bytes"]},
        "counters": counters | {"regrets": counters["refetches"]},
        "jobs": [job | {"stall_s": job["waited_s"]} for job in page["jobs"]],
        "scrub": scrub | {"damaged": scrub["corrupt"]},
        "origins": [origin | {"busy": origin["throttled"]} for origin in page["origins"]],
    }


def pin(row: Json) -> Json:
    """Return a row of `pins` that has the former key, too."""
    return row | {"here": row["cached"]}
