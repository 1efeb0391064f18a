"""Mounted filesystems: which one holds a path, its type, and its free space. All of it blocks."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardcache import errors
from shardcache.store.disk.disk_errors import disk_errors

_MOUNTS = Path("/proc/self/mountinfo")
# Other than those of FUSE, `fuseblk` is a local disk.
_NETWORK = re.compile(
    "nfs|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|orangefs|pvfs|fuse(?!blk)",
)
_ESCAPE = re.compile(r"\\([0-7]{3})")  # of a blank, say, in octal


def free_bytes(path: Path) -> int:
    """Return the bytes that an unprivileged process can still write to the filesystem of `path`.

    Raises DiskError.
    """
    with disk_errors(path):
        stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


class Mount(NamedTuple):
    """A mounted filesystem: its mount point and type."""

    folder: Path
    kind: str

    @property
    def is_network(self) -> bool:
        """True if each read may go over the network."""
        return _NETWORK.match(self.kind) is not None

    @property
    def is_memory(self) -> bool:
        """True if files take the node's memory."""
        return self.kind in ("tmpfs", "ramfs")


def mount_of(path: Path, table: Iterable[str] | None = None) -> Mount:
    """Return the filesystem of a path, which need not exist.

    Args:
        table: lines of /proc/self/mountinfo (proc(5)); by default, the file's.

    Raises CacheDirError if there is no /proc.
    """
    lines = _mounts() if table is None else table
    place = path.resolve()
    mounts = [mount for mount in map(_parse, lines) if place.is_relative_to(mount.folder)]
    # The deepest folder counts; of several filesystems mounted on it, the last one, which hides the
    # others: `max` returns the first of equal ones.
    return max(reversed(mounts), key=lambda mount: len(mount.folder.parts))


def _mounts() -> list[str]:
    try:
        return _MOUNTS.read_text().splitlines()
    except OSError as exn:
        raise errors.CacheDirError(
            f"{_MOUNTS}, which tells local disks from network filesystems, cannot be read "
            f"({exn.strerror})",
            remedy="mount -t proc proc /proc; containers have one by default",
        ) from exn


def _parse(line: str) -> Mount:
    """Return the mount of a line: `36 35 98:0 / /mnt rw master:1 - ext3 /dev/root rw`."""
    before, _, after = line.partition(" - ")
    _id, _parent_id, _device, _root, escaped_folder, *_options = before.split(" ")
    folder = _ESCAPE.sub(lambda escape: chr(int(escape[1], 8)), escaped_folder)
    kind, *_source = after.split(" ")
    return Mount(Path(folder), kind)
