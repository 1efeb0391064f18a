"""Comparison of the store's bookkeeping with the files in the cache folder.

Unlike recovery at start-up, it removes nothing: transfers may be writing to the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcache.store.disk.files import disk_errors
from shardcache.store.folder.layout import PART, SIDECAR, TAR, Layout, is_key
from shardcache.store.folder.recovery import Leftover, interrupted
from shardcache.store.shard import Shard


@dataclass(frozen=True, slots=True)
class FolderDiff:
    """Differences between bookkeeping and folder.

    Attributes:
        gone: keys of known shards and leftovers whose files are missing.
        found: unknown shards in the folder.
        parts: unknown interrupted downloads in the folder.
    """

    gone: list[str]
    found: list[Shard]
    parts: list[Leftover]


def compare_folder(layout: Layout, shards: Collection[str], leftovers: Collection[Leftover]) -> FolderDiff:
    """Compare the known shards and leftovers with the folder's contents. Blocks. Raises DiskError."""
    with disk_errors(layout.root):
        here = {tar.stem: tar for bucket in layout.shards.iterdir() if bucket.is_dir() for tar in _whole(bucket)}
        gone = [key for key in shards if key not in here]
        gone += [each.key for each in leftovers if not any(path.exists() for path in each.paths)]
        known = {each.key for each in leftovers}
        parts = [path for path in layout.partial.glob(f"*{PART}") if is_key(path.stem) and path.stem not in known]
        found = [_shard(key, tar) for key, tar in here.items() if key not in shards]
        return FolderDiff(gone, found, [interrupted(path) for path in parts])


def _whole(bucket: Path) -> Iterator[Path]:
    names = {path.name for path in bucket.iterdir()}
    for name in names:
        key, suffix = name[: -len(TAR)], name[-len(TAR) :]
        if suffix == TAR and is_key(key) and key + SIDECAR in names:
            yield bucket / name


def _shard(key: str, tar: Path) -> Shard:
    sidecar = tar.with_suffix(SIDECAR).stat()
    return Shard(key, tar.stat().st_size, sidecar.st_size, sidecar.st_mtime)
