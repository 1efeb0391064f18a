"""Mounted filesystems: which of them holds a path, its type, and its free space.

All functions block.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardcache.shared import exceptions
from shardcache.store.disk.disk_errors import disk_errors

_MOUNTS = Path("/proc/self/mountinfo")
# Types of network filesystems. All FUSE filesystems are counted among them, except `fuseblk`, which
# is on a local disk.
_NETWORK = re.compile(
    "nfs|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|orangefs|pvfs|fuse(?!blk)",
)
_ESCAPE = re.compile(r"\\([0-7]{3})")  # an escaped character, such as a blank, in octal


def free_bytes(path: Path) -> int:
    """Return the bytes that an unprivileged process can still write to the filesystem of `path`.

    Raises DiskError.
    """
    with disk_errors(path):
        stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


class Mount(NamedTuple):
    """A mounted filesystem.

    Attributes:
        folder: its mount point.
        kind: its type, such as "ext4".
    """

    folder: Path
    kind: str

    @property
    def is_network(self) -> bool:
        """True if each read may go over the network."""
        return _NETWORK.match(self.kind) is not None

    @property
    def is_memory(self) -> bool:
        """True if the files are in the node's memory."""
        return self.kind in ("tmpfs", "ramfs")


def mount_of(path: Path, table: Iterable[str] | None = None) -> Mount:
    """Return the filesystem of a path, which need not exist.

    Args:
        table: lines in the format of /proc/self/mountinfo (proc(5)); None to read that file.

    Raises CacheDirError if there is no /proc.
    """
    lines = _read_table() if table is None else table
    resolved = path.resolve()
    mounts = [mount for mount in map(_parse, lines) if resolved.is_relative_to(mount.folder)]
    # The deepest mount point above the path counts. If several filesystems are mounted there, the
    # last in the table hides the others. The table is reversed, as `max` returns the first of equal
    # items.
    return max(reversed(mounts), key=lambda mount: len(mount.folder.parts))


def _read_table() -> list[str]:
    """Return the lines of /proc/self/mountinfo. Raises CacheDirError."""
    try:
        return _MOUNTS.read_text().splitlines()
    except OSError as exn:
        # Without it, nothing tells whether a cache folder is on a local disk, as it has to be.
        raise exceptions.CacheDirError(
            f"{_MOUNTS}, which tells local disks from network filesystems, cannot be read "
            f"({exn.strerror})",
            remedy="mount -t proc proc /proc; containers have one by default",
        ) from exn


def _parse(line: str) -> Mount:
    """Return the mount in a line such as `36 35 98:0 / /mnt rw master:1 - ext3 /dev/root rw`."""
    before, _, after = line.partition(" - ")
    _id, _parent_id, _device, _root, escaped_folder, *_options = before.split(" ")
    folder = _ESCAPE.sub(lambda escape: chr(int(escape[1], 8)), escaped_folder)
    kind, *_source = after.split(" ")
    return Mount(Path(folder), kind)
