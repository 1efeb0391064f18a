"""Indexing a shard in a worker process. What it imports is small, for every worker imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache import tarindex
from shardcache.store.files import disk_errors


@dataclass(frozen=True, slots=True)
class Indexed:
    """What came of indexing.

    Attributes:
        header: the sidecar's, complete.
        sidecar_bytes: size of the sidecar.
        written: False where the sidecar is larger than was allowed and does not exist.
    """

    header: dict[str, Any]
    sidecar_bytes: int
    written: bool


def index_shard(
    tar_path: Path, sidecar_path: Path, header: dict[str, Any], url: str, require_end: bool, allowed_bytes: int
) -> Indexed:
    """Walk a tar to its end and write its sidecar, whose header is `header` with `samples`.

    Raises NotATarError, TruncatedShardError or CorruptShardError when the tar cannot be served, DiskFullError or
    CacheDirError when the cache's disk fails.
    """
    with disk_errors(sidecar_path):
        samples = tarindex.index_tar(tar_path, url, require_end=require_end)
        complete = header | {"samples": len(samples)}
        sidecar_bytes = tarindex.write(sidecar_path, complete, samples, allowed_bytes)
    return Indexed(complete, sidecar_bytes, sidecar_bytes <= allowed_bytes)
