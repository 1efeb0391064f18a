"""Shards and leftovers found in the cache folder, at the start and after changes by others.

The store calls `find_shards` and `find_leftovers` when it opens a folder; the reconciliation calls
`compare_folder` while the daemon runs. A leftover is a resumable download that no transfer is
using, or a quarantined shard: a corrupt one, kept for inspection. A companion is the second file of
a pair: the journal of a download, or the sidecar of a tar.

All functions block: call them in a thread.
"""

import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from shardcache.shared.exceptions import CacheDirError
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import allocated_or_zero, size_or_zero, unlink_quietly
from shardcache.store.disk.open_files import ask_if_open, is_open_elsewhere
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
        paths: first the download or the tar, then its companion.
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
        keys_without_companion = tars.keys() ^ sidecars.keys()
        for key in keys_without_companion:
            _try_remove(folder / (key + TAR), folder / (key + SIDECAR))
        other_users_keys = [key for key, tar in tars.items() if tar.st_uid != os.geteuid()]
        if other_users_keys:
            # One file of each folder is checked: the others will give the same result.
            _check_answers(folder / (other_users_keys[0] + TAR))
        shards += _paired(tars, sidecars)
    return sorted(shards, key=lambda shard: shard.used_at_s)


def find_leftovers(layout: Layout) -> list[Leftover]:
    """Return resumable downloads and quarantined shards; remove other unpublished files."""
    # A killed daemon may have left temporary files.
    replaceable = (layout.pins, layout.format, layout.format_copy)
    temporary = [layout.replacement_of(path) for path in replaceable]
    _try_remove(layout.probe, *temporary)
    _quarantine_open_tars(layout)
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


def _paired(tars: Stats, sidecars: Stats) -> list[Shard]:
    """Return the shards that have a tar and a sidecar.

    A shard's time of last use is the modification time of its sidecar.
    """
    return [
        Shard(key, tar.st_size, sidecars[key].st_size, sidecars[key].st_mtime)
        for key, tar in tars.items()
        if key in sidecars
    ]


def _check_answers(path: Path) -> None:
    """Raise CacheDirError if the kernel does not reveal whether a process has a file open.

    That is so for some files of other users. They could never be evicted, as a reader might have
    them open.
    """
    try:
        is_open = ask_if_open(path)
    except PermissionError:
        is_open = None
    if is_open is None:
        raise CacheDirError(
            f"{path} belongs to another user, so the kernel does not reveal whether a process has "
            "it mapped",
            remedy="change the owner of the cache folder's files to this user (chown -R "
            f"{os.geteuid()}), remove them, or choose another --cache-dir",
        )


def _quarantine_open_tars(layout: Layout) -> None:
    """Move unpublished tars to quarantine if readers of a killed daemon still have them open.

    Removing such a tar would not free its space before the readers close it. In quarantine, its
    bytes are accounted for.
    """
    for path in layout.partial.glob(f"*{TAR}"):
        # An error is ignored for the same reason as in `_try_remove`.
        with contextlib.suppress(OSError):
            if is_key(path.stem) and is_open_elsewhere(path):
                path.rename(layout.quarantine / path.name)


def _sweep(folder: Path, *, suffix: str, companion_suffix: str) -> list[Path]:
    """Return the files with one suffix in a folder; remove all but these and their companions.

    Files whose names do not begin with a cache key are left alone.

    Args:
        suffix: suffix of the files to return.
        companion_suffix: suffix of their companions.
    """
    own_paths = [path for path in folder.iterdir() if is_key(path.stem)]
    for path in own_paths:
        is_companion = path.suffix == companion_suffix and path.with_suffix(suffix).exists()
        if path.suffix != suffix and not is_companion:
            _try_remove(path)
    return [path for path in own_paths if path.suffix == suffix]


def _try_remove(*paths: Path) -> None:
    """Remove files, ignoring errors: cached shards can still be served from a read-only disk.

    A later start of the daemon tries again.
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
            present |= {shard.key: shard for shard in _paired(tars, sidecars)}

        missing = [key for key in shards if key not in present]
        missing += [leftover.key for leftover in leftovers if not _has_files(leftover)]

        leftover_keys = {leftover.key for leftover in leftovers}
        paths = [path for path in layout.partial.glob(f"*{PART}") if is_key(path.stem)]
        new_downloads = [Leftover.of(path) for path in paths if path.stem not in leftover_keys]

    new_shards = [shard for key, shard in present.items() if key not in shards]
    return FolderChanges(missing, new_shards, new_downloads)


def _has_files(leftover: Leftover) -> bool:
    return any(path.exists() for path in leftover.paths)
