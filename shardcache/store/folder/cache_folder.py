"""The cache folder as one daemon holds it: created, locked, checked, and recreated if lost.

The store takes a `CacheFolder` when it opens, and the monitor of the disk's health calls `probe` or
`probe_without_writing` periodically. The folder is held while its path leads to the folder that
this process has locked. All functions block: call them in a thread.
"""

import contextlib
import errno
import fcntl
import grp
import os
from pathlib import Path
from typing import Self

from shardcache.shared.exceptions import CacheDirError
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import unlink_quietly
from shardcache.store.folder.layout import Layout
from shardcache.store.folder.permissions import check_writers

# Modes of folders. With the set-group-id bit, new files get the folder's group, which may read the
# cache. Without it, they get the process's own group.
_SET_GROUP_ID_MODE = 0o2750
_OWN_GROUP_MODE = 0o750
_PROBE_BYTES = 4096


class CacheFolder:
    """One cache folder, locked until `close`.

    After it was deleted, unmounted or replaced, `probe` recreates it or locks it again.

    Args:
        group: name of the group that may read the cache; None for the process's own.
        fd: descriptor of the folder, which holds the lock.

    Attributes:
        is_lost: True once the folder around the cache folder was found missing, as after the end of
            a batch job.
    """

    def __init__(self, layout: Layout, group: str | None, fd: int) -> None:
        self._layout = layout
        self._group = group
        self._fd = fd
        self._mount = _mount_point(layout.root)
        self.is_lost = False

    def __repr__(self) -> str:
        return f"CacheFolder({str(self._layout.root)!r}, on {str(self._mount)!r})"

    @classmethod
    def take(cls, layout: Layout, group: str | None) -> Self:
        """Create the folder if necessary, and lock it.

        Raises CacheDirError, CacheFormatError, DiskError.
        """
        with disk_errors(layout.root):
            check_writers(layout)
            layout.check_format()
            _make_folders(layout, group)
            folder = cls(layout, group, _lock(layout.root))
            layout.mark_format()
            return folder

    def probe_without_writing(self) -> bool:
        """Check the folder, in place of `probe`, as far as that is possible without writing.

        Raises as `probe` does. Returns False: the folder was not recreated.
        """
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
                self._check_may_recreate()
                raise CacheDirError(
                    f"the cache folder {root} was deleted or replaced",
                    remedy="the daemon recreates the folder within moments; retry",
                )

    def probe(self) -> bool:
        """Check that the disk accepts writes, and recreate the folder if it is missing.

        Returns whether the folder was recreated or locked again. A missing folder is not recreated
        in two cases:

        1. The path leads to another filesystem now. After an unmount, the cache would fill the
           filesystem below the mount point.
        2. The folder around the cache folder is missing, too. A job's scheduler may have deleted
           that on purpose.

        Raises DiskFullError, DiskFailedError and CacheDirError, each with a remedy.
        """
        with disk_errors(self._layout.root):
            was_recreated = self._recreate_if_needed()
            try:
                self._write_probe()
            finally:
                unlink_quietly(self._layout.probe)
        return was_recreated

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._fd)

    def _write_probe(self) -> None:
        """Write a small file to the disk. Raises DiskError."""
        probe = self._layout.probe
        # For a full disk, `disk_errors` examines the filesystem of the folder around its path. So
        # it gets the path of the probe, not of the cache folder: the folder around the cache folder
        # may be on another filesystem.
        with disk_errors(probe), open(probe, "wb", buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())

    def _recreate_if_needed(self) -> bool:
        """Recreate and lock the folder if that is needed; return whether it was needed."""
        is_held = self._is_held()
        if is_held and all(folder.is_dir() for folder in self._layout.folders()):
            return False
        if not is_held:
            self._check_may_recreate()
            self._layout.check_format()
        check_writers(self._layout)
        _make_folders(self._layout, self._group)
        if not is_held:
            # The new folder is locked before the old lock is given up.
            previous_fd = self._fd
            self._fd = _lock(self._layout.root)
            os.close(previous_fd)
        self._layout.mark_format()
        return True

    def _is_held(self) -> bool:
        """Return whether the path leads to the locked folder."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self._layout.root.stat(), os.fstat(self._fd))
        return False

    def _check_may_recreate(self) -> None:
        """Raise CacheDirError if the missing folder must not be recreated, as `probe` describes."""
        root = self._layout.root
        if not root.parent.is_dir():
            self.is_lost = True
            raise CacheDirError(
                f"the cache folder {root} was deleted, and so was the folder around it",
                remedy=f"create {root.parent} again and the daemon recovers by itself; or restart "
                "it elsewhere",
            )
        present_mount = _mount_point(root)
        if present_mount != self._mount:
            raise CacheDirError(
                f"the cache folder {root} was on the filesystem mounted at {self._mount}, "
                f"but its path now leads to the one at {present_mount}",
                remedy=f"mount {self._mount} again and the daemon recovers by itself; "
                "to use the filesystem at the path now, restart the daemon",
            )


def _mount_point(path: Path) -> Path:
    """Return the mount point above a path, which need not exist."""
    return next(folder for folder in (path, *path.parents) if folder.is_mount())


def _make_folders(layout: Layout, group: str | None) -> None:
    """Create the folders that are missing, and give all of them the right group and mode.

    Args:
        group: name of the group that may read the cache; None to leave groups and modes as they
            are.
    """
    gid = None if group is None else grp.getgrnam(group).gr_gid
    for folder in layout.folders():
        folder.mkdir(parents=True, exist_ok=True, mode=_OWN_GROUP_MODE)
        if gid is None:
            continue
        # If the group is the process's own, new files get it without the set-group-id bit. The bit
        # is not set then, as a sandbox may deny it.
        if folder.stat().st_gid == gid == os.getegid():
            folder.chmod(_OWN_GROUP_MODE)
        else:
            os.chown(folder, -1, gid)  # -1 leaves the owner as it is
            folder.chmod(_SET_GROUP_ID_MODE)


def _lock(root: Path) -> int:
    """Lock the folder; return the descriptor that holds the lock. Raises CacheDirError, OSError."""
    # The folder itself is locked rather than a lock file, which could stay behind. The lock ends
    # with the process.
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
