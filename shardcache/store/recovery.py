"""Contents of the cache folder: recovered at start-up, and compared with the store's bookkeeping later.

Names and sizes are enough to serve: no file is opened, so start-up takes only as long as listing the folders, however
many bytes they hold. A shard's sidecar is read and compared with the file when the shard is first requested.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from shardcache.errors import CacheDirError
from shardcache.store.disk import ask_openness, disk_errors, size_or_zero, unlink_quietly
from shardcache.store.folder import JOURNAL, KEY_CHARS, PART, SIDECAR, TAR, Layout, is_key
from shardcache.store.shard import Shard

Stats = dict[str, os.stat_result]
"""Files of one kind, by cache key."""

_OURS = re.compile(rf"([0-9a-f]{{{KEY_CHARS}}})({re.escape(TAR)}|{re.escape(SIDECAR)})")


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files of an interrupted download or a quarantined shard; removed first when space is needed."""

    key: str
    paths: tuple[Path, ...]
    size_bytes: int


def find_shards(layout: Layout) -> list[Shard]:
    """Return every published shard, least recently used first; remove tars and sidecars without counterpart. Blocks.

    Raises CacheDirError if shards belong to another user, so that they could never be evicted.
    """
    found: list[Shard] = []
    for folder in _buckets(layout):
        tars, sidecars = _scan(folder)
        for key in tars.keys() ^ sidecars.keys():
            _sweep_away(folder / (key + TAR), folder / (key + SIDECAR))
        _check_owner([folder / (key + TAR) for key, tar in tars.items() if tar.st_uid != os.geteuid()])
        found += _shards(tars, sidecars)
    found.sort(key=attrgetter("used_at_s"))
    return found


def _buckets(layout: Layout) -> list[Path]:
    with os.scandir(layout.shards) as buckets:
        return [layout.shards / bucket.name for bucket in buckets if bucket.is_dir(follow_symlinks=False)]


def _scan(folder: Path) -> tuple[Stats, Stats]:
    """Return the tars and the sidecars in a bucket, by key."""
    stats: dict[str, Stats] = {TAR: {}, SIDECAR: {}}
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in os.listdir(fd):  # noqa: PTH208  # Path cannot list a file descriptor
            if named := _OURS.fullmatch(name):
                key, suffix = named.groups()
                with contextlib.suppress(FileNotFoundError):  # evicted since
                    stats[suffix][key] = os.stat(name, dir_fd=fd, follow_symlinks=False)
    finally:
        os.close(fd)
    return stats[TAR], stats[SIDECAR]


def _shards(tars: Stats, sidecars: Stats) -> list[Shard]:
    return [
        Shard(key, tar.st_size, sidecars[key].st_size, sidecars[key].st_mtime)
        for key, tar in tars.items()
        if key in sidecars
    ]


def _check_owner(others: Sequence[Path]) -> None:
    """Raise CacheDirError if files with another owner, to judge by the first, do not reveal if they are open."""
    for path in others[:1]:
        try:
            is_open = ask_openness(path)
        except PermissionError:
            is_open = None
        if is_open is None:
            raise CacheDirError(
                f"{path} belongs to another user, so the kernel does not reveal whether a process has it mapped",
                remedy=f"change the owner of the cache folder's files to this user (chown -R {os.geteuid()}), remove "
                "them, or choose another --cache-dir",
            )


def find_leftovers(layout: Layout) -> list[Leftover]:
    """Return resumable downloads and quarantined shards; remove other unpublished files. Blocks."""
    _sweep_away(layout.probe, layout.unfinished(layout.pins), layout.unfinished(layout.format))
    parts = _sweep(layout.partial, whole=PART, companion=JOURNAL)
    tars = _sweep(layout.quarantine, whole=TAR, companion=SIDECAR)
    return [interrupted(path) for path in parts] + [quarantined(path) for path in tars]


def _sweep(folder: Path, *, whole: str, companion: str) -> list[Path]:
    """Return the files with suffix `whole`; remove other cache files, but for their companions."""
    ours = [path for path in folder.iterdir() if is_key(path.stem)]
    for path in ours:
        if path.suffix != whole and not (path.suffix == companion and path.with_suffix(whole).exists()):
            _sweep_away(path)
    return [path for path in ours if path.suffix == whole]


def _sweep_away(*paths: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only disk can still be served from; a later start cleans up
        unlink_quietly(*paths)


def interrupted(part: Path) -> Leftover:
    """Return the leftover of a resumable download. Blocks."""
    paths = (part, part.with_suffix(JOURNAL))
    return Leftover(part.stem, paths, sum(map(size_or_zero, paths)))


def quarantined(tar: Path) -> Leftover:
    """Return the leftover of a quarantined shard. Blocks."""
    paths = (tar, tar.with_suffix(SIDECAR))
    return Leftover(f"quarantine/{tar.stem}", paths, sum(map(size_or_zero, paths)))


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
    """Compare the known shards and leftovers with the folder's contents. Blocks. Raises DiskError.

    Unlike recovery at start-up, it removes nothing: transfers may be writing to the folder.
    """
    with disk_errors(layout.root):
        here = {shard.key: shard for bucket in _buckets(layout) for shard in _shards(*_scan(bucket))}
        gone = [key for key in shards if key not in here]
        gone += [each.key for each in leftovers if not any(path.exists() for path in each.paths)]
        known = {each.key for each in leftovers}
        parts = [path for path in layout.partial.glob(f"*{PART}") if is_key(path.stem) and path.stem not in known]
        found = [shard for key, shard in here.items() if key not in shards]
        return FolderDiff(gone, found, [interrupted(path) for path in parts])
