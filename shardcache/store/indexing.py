"""Indexing a shard in a worker process. What it imports is small, for every worker imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardcache import tarindex
from shardcache.store.files import disk_errors


def index_shard(
    tar_path: Path, sidecar_path: Path, header: dict[str, Any], url: str, require_end: bool
) -> dict[str, Any]:
    """Walk a tar to its end, write its sidecar, and return the sidecar's header, which is `header` with `samples`.

    Raises NotATarError, TruncatedShardError or CorruptShardError when the tar cannot be served, DiskFullError or
    CacheDirError when the cache's disk fails.
    """
    with disk_errors(sidecar_path):
        samples = tarindex.index_tar(tar_path, url, require_end=require_end)
        complete = header | {"samples": len(samples)}
        tarindex.write(sidecar_path, complete, samples)
    return complete
