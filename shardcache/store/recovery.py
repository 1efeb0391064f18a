"""What a restart finds in the cache folder.

Names and sizes are enough to serve: no file is opened, so start-up takes the time of listing the folders, however
many bytes they hold. A shard's sidecar is read, and held against the file, when the shard is first asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcache.store.files import size_or_zero, unlink_quietly
from shardcache.store.layout import JOURNAL, PART, SIDECAR, TAR, Layout, is_key


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A published shard: sizes in bytes, last use in seconds since the epoch."""

    key: str
    size_bytes: int
    sidecar_bytes: int
    used_at_s: float


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files that are no shard: an interrupted download or a damaged shard. The first to go for space."""

    key: str
    paths: tuple[Path, ...]
    size_bytes: int


def find_shards(layout: Layout) -> list[FoundShard]:
    """Return every published shard, least recently used first; sweep halves that a crash left. Blocks."""
    found: list[FoundShard] = []
    with os.scandir(layout.shards) as buckets:
        names = [bucket.name for bucket in buckets if bucket.is_dir(follow_symlinks=False)]
    for name in names:
        found += _scan_bucket(layout.shards / name)
    return sorted(found, key=lambda shard: shard.used_at_s)


def _scan_bucket(folder: Path) -> Iterator[FoundShard]:
    tars: dict[str, int] = {}
    sidecars: dict[str, os.stat_result] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            key, _, suffix = entry.name.partition(".")
            if suffix == TAR[1:] and is_key(key):
                tars[key] = entry.stat(follow_symlinks=False).st_size
            elif suffix == SIDECAR[1:] and is_key(key):
                sidecars[key] = entry.stat(follow_symlinks=False)
    for key in tars.keys() ^ sidecars.keys():
        unlink_quietly(folder / (key + TAR), folder / (key + SIDECAR))
    for key in tars.keys() & sidecars.keys():
        yield FoundShard(key, tars[key], sidecars[key].st_size, sidecars[key].st_mtime)


def find_leftovers(layout: Layout) -> list[Leftover]:
    """Return interrupted downloads that may be gone on with, and quarantined shards; sweep the rest. Blocks."""
    leftovers: list[Leftover] = []
    for path in layout.partial.iterdir():
        if path.suffix == PART and is_key(path.stem):
            leftovers.append(interrupted(path))
        elif is_key(path.stem) and not (path.suffix == JOURNAL and path.with_suffix(PART).exists()):
            path.unlink()
    return leftovers + [
        quarantined(path) for path in layout.quarantine.iterdir() if path.suffix == TAR and is_key(path.stem)
    ]


def interrupted(part: Path) -> Leftover:
    """Return a download that may be gone on with. Blocks."""
    paths = (part, part.with_suffix(JOURNAL))
    return Leftover(part.stem, paths, sum(map(size_or_zero, paths)))


def quarantined(tar: Path) -> Leftover:
    """Return a damaged shard that was set aside, as what may go first. Blocks."""
    paths = (tar, tar.with_suffix(SIDECAR))
    return Leftover(f"quarantine/{tar.stem}", paths, sum(map(size_or_zero, paths)))
