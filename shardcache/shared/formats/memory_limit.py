"""The limit on the memory of a helper process that reads untrusted files.

A helper process indexes a shard, or decodes a parquet file, outside the daemon. It calls
`limit_memory` at its start.
"""

import resource
from contextlib import suppress
from pathlib import Path

MAX_MEMORY_BYTES = 4 * 1024**3
"""Limit for the process, enough to index the largest shard, or to decode a page of parquet."""

# If the node's memory runs out nevertheless, this score makes the kernel kill this process first.
# See oom_score_adj in proc(5).
_KILLED_FIRST = "1000"


def limit_memory() -> None:
    """Limit the memory that this process may allocate; mapped files are not counted."""
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = MAX_MEMORY_BYTES
    if hard_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST)
