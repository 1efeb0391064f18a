"""Shards and leftovers found in the cache folder, at the start and after changes by others.

The store calls `find_shards` and `find_leftovers` when it opens a folder; the reconciliation calls
`compare_folder` while the daemon runs. A leftover is a resumable download that no transfer is
using, or a quarantined shard. A companion is the second file of a pair: the journal of a download,
or the sidecar of a tar. All functions block: call them in a thread.
"""

import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from shardcache.errors import CacheDirError
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import allocated_or_zero, size_or_zero, unlink_quietly
from shardcache.store.disk.open_files import ask_openness, is_open_elsewhere
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR, Layout
from shardcache.store.keys import KEY_CHARS, is_key
from shardcache.store.shard import Shard

# The name of a published file; the groups are its key and its suffix.
_PUBLISHED_NAME = re.compile(rf"([0-9a-f]{{{KEY_CHARS}}})({re.escape(TAR)}|{re.escape(SIDECAR)})")

Stats = dict[str, os.stat_result]
"""The results of `stat` for files of one kind (tars or sidecars), by cache key."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files of an interrupted download or a quarantined shard.

    Leftovers are removed first when space is needed.

    Attributes:
        key: the cache key of an interrupted download; for a quarantined shard, "quarantine/" and
            its cache key.
        paths: first the file, then its journal or sidecar.
        size_bytes: bytes that the files take on disk.
    """

    key: str
    paths: tuple[Path, ...]
    size_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the leftover that a file belongs to.

        Args:
            path: the .part file of a resumable download, or a tar in quarantine.
        """
        if path.suffix == PART:
            key = path.stem
            companion = path.with_suffix(JOURNAL)
        else:
            key = f"quarantine/{path.stem}"
            companion = path.with_suffix(SIDECAR)
        size_bytes = allocated_or_zero(path) + size_or_zero(companion)
        return cls(key, (path, companion), size_bytes)


def find_shards(layout: Layout) -> list[Shard]:
    """Return every published shard, least recently used first.

    A tar without a sidecar, and a sidecar without a tar, are removed. Raises CacheDirError.
    """
    shards: list[Shard] = []
    for folder in _shard_folders(layout):
        tars, sidecars = _scan(folder)
        lone = tars.keys() ^ sidecars.keys()
        for key in lone:
            _sweep_away(folder / (key + TAR), folder / (key + SIDECAR))
        other_users_keys = [key for key, tar in tars.items() if tar.st_uid != os.geteuid()]
        if other_users_keys:
            # One file of each folder is checked: the others will give the same result.
            _check_openness(folder / (other_users_keys[0] + TAR))
        shards += _shards(tars, sidecars)
    return sorted(shards, key=lambda shard: shard.used_at_s)


def find_leftovers(layout: Layout) -> list[Leftover]:
    """Return resumable downloads and quarantined shards; remove other unpublished files."""
    # A killed daemon may have left the temporary files that were to replace these.
    replaceable = (layout.pins, layout.format, layout.format_copy)
    temporary = [layout.replacement_of(path) for path in replaceable]
    _sweep_away(layout.probe, *temporary)
    _set_open_tars_aside(layout)
    downloads = _sweep(layout.partial, suffix=PART, companion_suffix=JOURNAL)
    tars = _sweep(layout.quarantine, suffix=TAR, companion_suffix=SIDECAR)
    return [Leftover.of(path) for path in (*downloads, *tars)]


def _shard_folders(layout: Layout) -> list[Path]:
    """Return the existing folders of published shards, at most 256."""
    with os.scandir(layout.shards) as entries:
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [layout.shards / folder.name for folder in folders]


def _scan(folder: Path) -> tuple[Stats, Stats]:
    """Return the tars and the sidecars in a folder of published shards, by key."""
    stats: dict[str, Stats] = {TAR: {}, SIDECAR: {}}
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _PUBLISHED_NAME.fullmatch(entry.name)
            if name is None:
                continue
            key, suffix = name.groups()
            with contextlib.suppress(FileNotFoundError):  # the file was removed just now
                stats[suffix][key] = entry.stat(follow_symlinks=False)
    return stats[TAR], stats[SIDECAR]


def _shards(tars: Stats, sidecars: Stats) -> list[Shard]:
    """Return the shards that have both files.

    A shard's time of last use is the modification time of its sidecar.
    """
    return [
        Shard(key, tar.st_size, sidecars[key].st_size, sidecars[key].st_mtime)
        for key, tar in tars.items()
        if key in sidecars
    ]


def _check_openness(path: Path) -> None:
    """Raise CacheDirError if the kernel does not reveal whether a process has a file open.

    That is so for files of other users. They could never be evicted, as a reader might use them.
    """
    try:
        is_open = ask_openness(path)
    except PermissionError:
        is_open = None
    if is_open is None:
        raise CacheDirError(
            f"{path} belongs to another user, so the kernel does not reveal whether a process has "
            "it mapped",
            remedy="change the owner of the cache folder's files to this user (chown -R "
            f"{os.geteuid()}), remove them, or choose another --cache-dir",
        )


def _set_open_tars_aside(layout: Layout) -> None:
    """Move unpublished tars to quarantine if readers of a killed daemon still have them open.

    Removing such a tar would not free its space before the readers close it. In quarantine, its
    bytes are accounted for.
    """
    for path in layout.partial.glob(f"*{TAR}"):
        # A read-only disk is no reason to fail, as in `_sweep_away`.
        with contextlib.suppress(OSError):
            if is_key(path.stem) and is_open_elsewhere(path):
                path.rename(layout.quarantine / path.name)


def _sweep(folder: Path, *, suffix: str, companion_suffix: str) -> list[Path]:
    """Return the cache files in a folder with one suffix; remove other cache files.

    Files that do not have the name of a cache file are left alone.

    Args:
        suffix: suffix of the files to return.
        companion_suffix: suffix of their companions, which stay as well.
    """
    ours = [path for path in folder.iterdir() if is_key(path.stem)]
    for path in ours:
        is_companion = path.suffix == companion_suffix and path.with_suffix(suffix).exists()
        if path.suffix != suffix and not is_companion:
            _sweep_away(path)
    return [path for path in ours if path.suffix == suffix]


def _sweep_away(*paths: Path) -> None:
    """Remove files, if that is possible.

    Cached shards can still be served from a disk that is read-only; a later start removes the files
    then.
    """
    with contextlib.suppress(OSError):
        unlink_quietly(*paths)


class FolderChanges(NamedTuple):
    """Differences between the folder and the shards and leftovers that the daemon knows.

    Attributes:
        missing: keys of known shards and leftovers whose files are gone.
        shards: shards in the folder that the daemon does not know.
        downloads: resumable downloads in the folder that the daemon does not know.
    """

    missing: list[str]
    shards: list[Shard]
    downloads: list[Leftover]


def compare_folder(
    layout: Layout,
    shards: Collection[str],
    leftovers: Collection[Leftover],
) -> FolderChanges:
    """Compare the folder with the shards and leftovers that the daemon knows.

    Unlike recovery at start-up, it removes nothing, as transfers may be writing to the folder.

    Args:
        shards: cache keys of the known shards.
        leftovers: the known leftovers.

    Raises DiskError.
    """
    with disk_errors(layout.root):
        present: dict[str, Shard] = {}
        for folder in _shard_folders(layout):
            tars, sidecars = _scan(folder)
            present |= {shard.key: shard for shard in _shards(tars, sidecars)}

        missing = [key for key in shards if key not in present]
        missing += [leftover.key for leftover in leftovers if not _has_files(leftover)]

        known_keys = {leftover.key for leftover in leftovers}
        paths = [path for path in layout.partial.glob(f"*{PART}") if is_key(path.stem)]
        downloads = [Leftover.of(path) for path in paths if path.stem not in known_keys]

    unknown = [shard for key, shard in present.items() if key not in shards]
    return FolderChanges(missing, unknown, downloads)


def _has_files(leftover: Leftover) -> bool:
    return any(path.exists() for path in leftover.paths)
