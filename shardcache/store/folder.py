"""The cache folder: its layout and format, the lock that one daemon holds on it, and its contents.

<root>/shards/ab/<key>.tar    a published shard: a plain tar, or any file, never written again
<root>/shards/ab/<key>.idx    its sidecar: JSON header and sample index
<root>/partial/<key>.part     a shard being fetched, with <key>.journal for its finished parts
<root>/partial/<key>.tar, .idx    a tar and its sidecar about to be published
<root>/partial/probe, pins, format    files about to replace <root>/pins and <root>/format, or to check the disk
<root>/names/ab/<key>/<name>    a link to a published shard, with its object's name
<root>/quarantine/<key>.tar   a corrupt shard, kept for inspection; first to be removed when space is needed
                               (also an inflated tar that readers of a killed daemon have open)
<root>/catalogue/             a diskcache database; may be deleted at any time
<root>/pins                   the pins, one per line
<root>/format                 the format number of the cache folder

Names and sizes are enough to serve: at start no file is opened. A shard's sidecar is read and compared with the file
when the shard is first requested. Everything here blocks: call it in a thread.
"""

import contextlib
import errno
import fcntl
import grp
import hashlib
import os
import re
import shlex
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from shardcache.errors import CacheDirError, CacheFormatError
from shardcache.store.disk import (
    ask_openness,
    disk_errors,
    is_open_elsewhere,
    other_writers,
    replace_file,
    size_or_zero,
    unlink_quietly,
)
from shardcache.store.shard import Shard

log = structlog.get_logger()

# A release that changes names or formats in the folder increments the number: an older release then refuses the folder
# instead of taking every shard in it for damaged.
FORMAT = 1
_UNMARKED = 0
_FORMAT_TEXT = re.compile(r"[0-9]{1,9}\n?")
KEY_CHARS = 32
TAR, SIDECAR, PART, JOURNAL = ".tar", ".idx", ".part", ".journal"

_OWN_MODE = 0o750
_MODE = 0o2750  # set-group-id: files inherit the group that may read the cache
_PROBE_BYTES = 4096
_OURS = re.compile(rf"([0-9a-f]{{{KEY_CHARS}}})({re.escape(TAR)}|{re.escape(SIDECAR)})")

Stats = dict[str, os.stat_result]
"""Files of one kind, by cache key."""


def shard_key(url: str, version: str) -> str:
    """Return the cache key of one version of one shard: a hash of the whole url, not of its last component."""
    return hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()[:KEY_CHARS]


def is_key(name: str) -> bool:
    """Return True if a file's stem has the form of a cache key; other files in the folder are never touched."""
    return len(name) == KEY_CHARS and all(char in "0123456789abcdef" for char in name)


class Layout:
    """The paths below one cache folder; the module's docstring says what each holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shards, self.partial, self.quarantine = root / "shards", root / "partial", root / "quarantine"
        self.catalogue, self.pins, self.format = root / "catalogue", root / "pins", root / "format"
        self.probe = self.partial / "probe"
        self.names = root / "names"

    def bucket(self, key: str) -> Path:
        """Return the folder of a published shard, one of 256 that keep directories short."""
        return self.shards / key[:2]

    def tar(self, key: str) -> Path:
        """Return the path of a published shard."""
        return self.bucket(key) / (key + TAR)

    def sidecar(self, key: str) -> Path:
        """Return the path of a published shard's sidecar."""
        return self.bucket(key) / (key + SIDECAR)

    def in_progress(self, key: str, suffix: str) -> Path:
        """Return the path of one of a shard's unpublished files."""
        return self.partial / (key + suffix)

    def unfinished(self, path: Path) -> Path:
        """Return the path of the temporary file used to replace `path`, one of the folder's own files."""
        return self.partial / path.name

    def folders(self) -> list[Path]:
        """Return every folder that must exist, parents first."""
        buckets = [self.shards / f"{number:02x}" for number in range(256)]
        return [self.root, self.shards, self.partial, self.quarantine, self.names, *buckets]

    def check_format(self) -> None:
        """Raise CacheFormatError if this release cannot use an existing folder. Changes nothing."""
        found = self._read_format()
        if found is None and not self._is_cache():
            raise CacheFormatError(
                f"{self.format} does not contain a number, so the cache folder's format is unknown",
                remedy="check that the path is a cache folder; if this or an older release wrote it, remove the file",
            )
        if found is not None and found > FORMAT:
            raise CacheFormatError(
                f"the cache folder {self.root} has format {found}, but this release supports formats up to {FORMAT}",
                remedy="start the newer release that wrote it, or give this one another --cache-dir; to discard the "
                "cached shards, remove the folder",
            )

    def mark_format(self) -> None:
        """Write the current format number to a locked folder, unless it is there already."""
        with contextlib.suppress(OSError):  # a disk that cannot be written is still served from
            found = self._read_format()
            if found is None:
                log.warning(
                    "the file with the cache folder's format is damaged; writing it again", file=str(self.format)
                )
            if found != FORMAT:
                replace_file(self.format, self.unfinished(self.format), [f"{FORMAT}\n"])

    def _read_format(self) -> int | None:
        """Return the format number, or None if its file is damaged."""
        try:
            text = self.format.read_bytes().decode("ascii", "replace")
        except FileNotFoundError:
            return _UNMARKED
        return int(text) if _FORMAT_TEXT.fullmatch(text) else None

    def _is_cache(self) -> bool:
        """Return True if the folder is a cache by everything else in it."""
        return all(folder.is_dir() for folder in (self.shards, self.partial, self.quarantine))


class CacheFolder:
    """One cache folder, locked until `close`, and recovered after it was deleted, unmounted or replaced."""

    def __init__(self, layout: Layout, group: str | None, fd: int) -> None:
        self._layout = layout
        self._group = group
        self._fd = fd
        self._mount = _mount_point(layout.root)
        self.is_lost = False  # True once the folder around it was found missing, such as a job's scratch folder

    def __repr__(self) -> str:
        return f"CacheFolder({str(self._layout.root)!r}, on {str(self._mount)!r})"

    @classmethod
    def take(cls, layout: Layout, group: str | None) -> Self:
        """Create the folder if necessary, and lock it. Raises CacheDirError, CacheFormatError, DiskError."""
        with disk_errors(layout.root):
            _check_writers(layout)
            layout.check_format()
            _make_folders(layout, group)
            folder = cls(layout, group, _lock(layout.root))
            layout.mark_format()
            return folder

    def look(self) -> bool:
        """Check what can be checked without writing, raising the errors of `probe`; return False: nothing changed."""
        self.check()
        with disk_errors(self._layout.root):
            if os.statvfs(self._layout.root).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return False

    def check(self) -> None:
        """Raise CacheDirError unless the path still leads to the locked folder."""
        root = self._layout.root
        with disk_errors(root):
            if not self._is_held():
                self._check_place()
                remedy = "the daemon recreates the folder within moments; retry"
                raise CacheDirError(f"the cache folder {root} was deleted or replaced", remedy=remedy)

    def probe(self) -> bool:
        """Check that the disk accepts writes; return True if the folder had to be recreated or locked again.

        A missing folder is recreated, but never on another filesystem: after an unmount that would fill the filesystem
        below the mount point; nor is the folder around it, which a job's scheduler may have deleted. Raises
        DiskFullError, DiskFailedError and CacheDirError, each with a remedy.
        """
        with disk_errors(self._layout.root):
            was_mended = self._mend()
            try:
                with disk_errors(self._layout.partial), open(self._layout.probe, "wb", buffering=0) as file:
                    file.write(bytes(_PROBE_BYTES))
                    os.fsync(file.fileno())
            finally:
                unlink_quietly(self._layout.probe)
        return was_mended

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._fd)

    def _mend(self) -> bool:
        is_held = self._is_held()
        if is_held and all(folder.is_dir() for folder in self._layout.folders()):
            return False
        if not is_held:
            self._check_place()
            self._layout.check_format()
        _check_writers(self._layout)
        _make_folders(self._layout, self._group)
        if not is_held:
            held, self._fd = self._fd, _lock(self._layout.root)
            os.close(held)
        self._layout.mark_format()
        return True

    def _is_held(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self._layout.root.stat(), os.fstat(self._fd))
        return False

    def _check_place(self) -> None:
        """Raise CacheDirError unless a missing folder may be recreated."""
        root = self._layout.root
        if not root.parent.is_dir():
            self.is_lost = True
            raise CacheDirError(
                f"the cache folder {root} was deleted, and so was the folder around it",
                remedy=f"create {root.parent} again and the daemon recovers by itself; or restart it elsewhere",
            )
        present = _mount_point(self._layout.root)
        if present != self._mount:
            raise CacheDirError(
                f"the cache folder {self._layout.root} was on the filesystem mounted at {self._mount}, but its path "
                f"now leads to the one at {present}",
                remedy=f"mount {self._mount} again and the daemon recovers by itself; to use the filesystem at "
                "the path now, restart the daemon",
            )


def _mount_point(path: Path) -> Path:
    """Return the mount point of the filesystem that contains a path, or would contain it once created."""
    return next(folder for folder in (path, *path.parents) if folder.is_mount())


def _check_writers(layout: Layout) -> None:
    """Raise CacheDirError if another user can write where the daemon does, or has planted a file.

    A link would be followed, and in a folder of theirs they could swap a file at any time.
    """
    root, *folders = layout.folders()
    folders.append(layout.catalogue)
    for path in (*folders, layout.pins, layout.format, layout.probe):
        _check_planted(path, root)
    for folder in (root, *folders):
        _check_open(folder, root)


def _check_open(folder: Path, root: Path) -> None:
    try:
        who = other_writers(folder, os.geteuid())
    except (FileNotFoundError, NotADirectoryError):
        return
    if who:
        own = shlex.quote(str(root / "shardcache"))
        raise CacheDirError(
            f"{who} can write to {folder}, and replace what the daemon reads and writes there",
            remedy=f"let nobody else write there (chmod go-w {shlex.quote(str(folder))}, and chown if "
            "it is not this user's), or choose a folder that the daemon creates for itself: "
            f"--cache-dir {own}",
        )


def _check_planted(path: Path, root: Path) -> None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if found.st_uid not in (0, os.geteuid()):
        kind = "is a link of" if stat.S_ISLNK(found.st_mode) else "belongs to"
        raise CacheDirError(
            f"{path} {kind} another user, who can write to the cache folder",
            remedy="remove it, or change its owner if it is the daemon's own "
            f"(chown -R {os.geteuid()}), and let nobody else write there "
            f"(chmod go-w {shlex.quote(str(root))}); or choose another --cache-dir",
        )


def _make_folders(layout: Layout, group: str | None) -> None:
    gid = None if group is None else grp.getgrnam(group).gr_gid
    for folder in layout.folders():
        folder.mkdir(parents=True, exist_ok=True, mode=_OWN_MODE)
        if gid is None:
            continue
        # Files get the process's own group anyway, and a sandbox may deny the set-group-id bit.
        if folder.stat().st_gid == gid == os.getegid():
            folder.chmod(_OWN_MODE)
        else:
            os.chown(folder, -1, gid)
            folder.chmod(_MODE)


def _lock(root: Path) -> int:
    # Lock the folder itself: no lock file can stay behind, and the lock ends with the process.
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        remedy = "stop the other daemon, or give this one its own --cache-dir"
        raise CacheDirError(f"another daemon holds the cache folder {root}", remedy=remedy) from None
    return fd


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files of an interrupted download or a quarantined shard; removed first when space is needed."""

    key: str
    paths: tuple[Path, ...]
    size_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the leftover of the part of a resumable download, or of a tar in quarantine."""
        is_part = path.suffix == PART
        paths = (path, path.with_suffix(JOURNAL if is_part else SIDECAR))
        return cls(path.stem if is_part else f"quarantine/{path.stem}", paths, sum(map(size_or_zero, paths)))


def find_shards(layout: Layout) -> list[Shard]:
    """Return every published shard, least recently used first; remove lone files. Raises CacheDirError."""
    found: list[Shard] = []
    for folder in _buckets(layout):
        tars, sidecars = _scan(folder)
        for key in tars.keys() ^ sidecars.keys():
            _sweep_away(folder / (key + TAR), folder / (key + SIDECAR))
        _check_owner([folder / (key + TAR) for key, tar in tars.items() if tar.st_uid != os.geteuid()])
        found += _shards(tars, sidecars)
    return sorted(found, key=lambda shard: shard.used_at_s)


def find_leftovers(layout: Layout) -> list[Leftover]:
    """Return resumable downloads and quarantined shards; remove other unpublished files."""
    _sweep_away(layout.probe, layout.unfinished(layout.pins), layout.unfinished(layout.format))
    _set_open_tars_aside(layout)
    parts = _sweep(layout.partial, whole=PART, companion=JOURNAL)
    tars = _sweep(layout.quarantine, whole=TAR, companion=SIDECAR)
    return [Leftover.of(path) for path in (*parts, *tars)]


def _buckets(layout: Layout) -> list[Path]:
    with os.scandir(layout.shards) as buckets:
        return [layout.shards / bucket.name for bucket in buckets if bucket.is_dir(follow_symlinks=False)]


def _scan(folder: Path) -> tuple[Stats, Stats]:
    """Return the tars and the sidecars in a bucket, by key."""
    stats: dict[str, Stats] = {TAR: {}, SIDECAR: {}}
    with os.scandir(folder) as entries:
        for entry in entries:
            if named := _OURS.fullmatch(entry.name):
                key, suffix = named.groups()
                with contextlib.suppress(FileNotFoundError):  # evicted since
                    stats[suffix][key] = entry.stat(follow_symlinks=False)
    return stats[TAR], stats[SIDECAR]


def _shards(tars: Stats, sidecars: Stats) -> list[Shard]:
    return [
        Shard(key, tar.st_size, sidecars[key].st_size, sidecars[key].st_mtime)
        for key, tar in tars.items()
        if key in sidecars
    ]


def _check_owner(others: Sequence[Path]) -> None:
    """Raise CacheDirError if files with another owner do not reveal if they are open: they could never be evicted."""
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


def _set_open_tars_aside(layout: Layout) -> None:
    """Move inflated tars that readers of a killed daemon have open to quarantine, which counts them."""
    for path in layout.partial.glob(f"*{TAR}"):
        with contextlib.suppress(OSError):  # as below
            if is_key(path.stem) and is_open_elsewhere(path):
                path.rename(layout.quarantine / path.name)


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


def compare_folder(
    layout: Layout, shards: Collection[str], leftovers: Collection[Leftover]
) -> tuple[list[str], list[Shard], list[Leftover]]:
    """Return the keys of known shards and leftovers whose files are missing, and those found that are unknown.

    Unlike recovery at start-up, it removes nothing: transfers may be writing to the folder. Raises DiskError.
    """
    with disk_errors(layout.root):
        here = {shard.key: shard for bucket in _buckets(layout) for shard in _shards(*_scan(bucket))}
        gone = [key for key in shards if key not in here]
        gone += [each.key for each in leftovers if not any(path.exists() for path in each.paths)]
        known = {each.key for each in leftovers}
        parts = [path for path in layout.partial.glob(f"*{PART}") if is_key(path.stem) and path.stem not in known]
        return gone, [shard for key, shard in here.items() if key not in shards], [*map(Leftover.of, parts)]
