"""What a restart finds in the cache folder.

Names and sizes are enough to serve: no file is opened, so start-up takes the time of listing the folders, however
many bytes they hold. A shard's sidecar is read, and held against the file, when the shard is first asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from shardcache.errors import CacheDirError
from shardcache.store.files import size_or_zero, unlink_quietly
from shardcache.store.layout import JOURNAL, KEY_CHARS, PART, SIDECAR, TAR, Layout, is_key
from shardcache.store.openfiles import ask_openness
from shardcache.store.shard import Shard

_OURS = re.compile(rf"([0-9a-f]{{{KEY_CHARS}}})({re.escape(TAR)}|{re.escape(SIDECAR)})")


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files that are no shard: an interrupted download or a damaged shard. The first to go for space."""

    key: str
    paths: tuple[Path, ...]
    size_bytes: int


def find_shards(layout: Layout) -> list[Shard]:
    """Return every published shard, least recently used first; sweep halves that a crash left. Blocks.

    Raises CacheDirError where shards are another user's, so that they could never be evicted.
    """
    found: list[Shard] = []
    with os.scandir(layout.shards) as buckets:
        names = [bucket.name for bucket in buckets if bucket.is_dir(follow_symlinks=False)]
    for name in names:
        found += _scan_bucket(layout.shards / name)
    found.sort(key=attrgetter("used_at_s"))
    return found


def _scan_bucket(folder: Path) -> list[Shard]:
    stats: dict[str, dict[str, os.stat_result]] = {TAR: {}, SIDECAR: {}}
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in os.listdir(fd):  # noqa: PTH208  # of a descriptor, which no Path can be
            if named := _OURS.fullmatch(name):
                key, suffix = named.groups()
                stats[suffix][key] = os.stat(name, dir_fd=fd, follow_symlinks=False)
    finally:
        os.close(fd)
    tars, sidecars = stats[TAR], stats[SIDECAR]
    for key in tars.keys() ^ sidecars.keys():
        _sweep_away(folder / (key + TAR), folder / (key + SIDECAR))
        tars.pop(key, None)
    _check_owner([folder / (key + TAR) for key, tar in tars.items() if tar.st_uid != os.geteuid()])
    return [Shard(key, tar.st_size, sidecars[key].st_size, sidecars[key].st_mtime) for key, tar in tars.items()]


def _check_owner(others: Sequence[Path]) -> None:
    """Raise CacheDirError where the first of some files of another owner, as it seems, tells not whether it is open."""
    for path in others[:1]:
        try:
            told = ask_openness(path)
        except PermissionError:
            told = None
        if told is None:
            raise CacheDirError(
                f"{path} is another user's, and the kernel does not say whether some process has it mapped",
                remedy=f"make all files in the cache folder this user's (chown -R {os.geteuid()}), or remove them, or "
                "choose another --cache-dir",
            )


def find_leftovers(layout: Layout) -> list[Leftover]:
    """Return interrupted downloads that may be gone on with, and quarantined shards; sweep the rest. Blocks."""
    _sweep_away(layout.probe, layout.unfinished(layout.pins), layout.unfinished(layout.format))
    parts = _sweep(layout.partial, whole=PART, beside=JOURNAL)
    tars = _sweep(layout.quarantine, whole=TAR, beside=SIDECAR)
    return [interrupted(path) for path in parts] + [quarantined(path) for path in tars]


def _sweep(folder: Path, *, whole: str, beside: str) -> list[Path]:
    """Return the files of one kind, and remove what of ours is neither one of these nor lies beside one."""
    ours = [path for path in folder.iterdir() if is_key(path.stem)]
    for path in ours:
        if path.suffix != whole and not (path.suffix == beside and path.with_suffix(whole).exists()):
            _sweep_away(path)
    return [path for path in ours if path.suffix == whole]


def _sweep_away(*paths: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only disk can still be served from; a later start sweeps
        unlink_quietly(*paths)


def interrupted(part: Path) -> Leftover:
    """Return a download that may be gone on with. Blocks."""
    paths = (part, part.with_suffix(JOURNAL))
    return Leftover(part.stem, paths, sum(map(size_or_zero, paths)))


def quarantined(tar: Path) -> Leftover:
    """Return a damaged shard that was set aside, as what may go first. Blocks."""
    paths = (tar, tar.with_suffix(SIDECAR))
    return Leftover(f"quarantine/{tar.stem}", paths, sum(map(size_or_zero, paths)))
