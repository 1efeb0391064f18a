"""The limit on the memory of a process that reads what anybody may have written."""

import resource
from contextlib import suppress
from pathlib import Path

MAX_MEMORY_BYTES = 4 * 1024**3
"""Limit for the process, by which it can index the largest shard, or decode a page of parquet."""

_KILLED_FIRST = "1000"  # where memory runs out nevertheless; see proc(5), oom_score_adj


def limit_memory() -> None:
    """Limit what this process may allocate; mapped files are not counted."""
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = MAX_MEMORY_BYTES
    if hard_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST)
