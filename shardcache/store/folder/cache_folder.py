"""The cache folder: locked exclusively, and recovered after it was deleted, unmounted or replaced.

All functions block: call them in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
from pathlib import Path
from typing import Self

from shardcache.errors import CacheDirError
from shardcache.store.disk.files import disk_errors, unlink_quietly
from shardcache.store.folder import format as folder_format
from shardcache.store.folder.layout import Layout

_OWN_MODE = 0o750
_MODE = 0o2750  # set-group-id: files inherit the group that may read the cache
_PROBE_BYTES = 4096


class CacheFolder:
    """One cache folder, locked until `close`."""

    def __init__(self, layout: Layout, group: str | None, fd: int) -> None:
        self._layout = layout
        self._group = group
        self._fd = fd
        self._mount = _mount_point(layout.root)

    def __repr__(self) -> str:
        return f"CacheFolder({str(self._layout.root)!r}, on {str(self._mount)!r})"

    @classmethod
    def take(cls, layout: Layout, group: str | None) -> Self:
        """Create the folder if necessary, and lock it.

        Raises CacheDirError if it cannot be created or another daemon holds it, CacheFormatError if a newer release
        wrote it, DiskFullError, DiskFailedError.
        """
        with disk_errors(layout.root):
            folder_format.check(layout)
            _make_folders(layout, group)
            folder = cls(layout, group, _lock(layout.root))
            folder_format.mark(layout)
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
                self._check_mount()
                raise CacheDirError(
                    f"the cache folder {root} was deleted or replaced",
                    remedy="the daemon recreates the folder within moments; retry",
                )

    def probe(self) -> bool:
        """Check that the disk accepts writes; return True if the folder had to be recreated or locked again.

        A missing folder is recreated, but never on another filesystem: after an unmount that would fill the filesystem
        below the mount point. Raises DiskFullError, DiskFailedError and CacheDirError, each with a remedy.
        """
        with disk_errors(self._layout.root):
            anew = self._mend()
            self._write()
        return anew

    def _write(self) -> None:
        path = self._layout.probe
        try:
            with disk_errors(self._layout.partial):
                _write_and_sync(path)
        finally:
            unlink_quietly(path)

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._fd)

    def _mend(self) -> bool:
        if self._is_held():
            if all(folder.is_dir() for folder in self._layout.folders()):
                return False
            _make_folders(self._layout, self._group)
            folder_format.mark(self._layout)
            return True
        self._check_mount()
        folder_format.check(self._layout)
        _make_folders(self._layout, self._group)
        held, self._fd = self._fd, _lock(self._layout.root)
        os.close(held)
        folder_format.mark(self._layout)
        return True

    def _is_held(self) -> bool:
        try:
            return os.path.samestat(self._layout.root.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _check_mount(self) -> None:
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


def _write_and_sync(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        os.write(fd, bytes(_PROBE_BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_folders(layout: Layout, group: str | None) -> None:
    gid = None if group is None else grp.getgrnam(group).gr_gid
    for folder in layout.folders():
        folder.mkdir(parents=True, exist_ok=True, mode=_OWN_MODE)
        if gid is not None:
            _open_to(folder, gid)


def _open_to(folder: Path, gid: int) -> None:
    if (
        folder.stat().st_gid == gid == os.getegid()
    ):  # files get that group anyway, and a sandbox may deny the set-group-id bit
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
        raise CacheDirError(
            f"another daemon holds the cache folder {root}",
            remedy="stop the other daemon, or give this one its own --cache-dir",
        ) from None
    return fd
