"""Mounted filesystems: which of them a path is on, and whether that is a local disk's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_NETWORK = re.compile("nfs|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|orangefs|pvfs|fuse(?!blk)")
_OCTAL = re.compile(r"\\([0-7]{3})")


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
    """Return the filesystem of a path, which need not exist; `table` holds lines of /proc/self/mountinfo (proc(5))."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines() if table is None else table
    place = path.resolve()
    mounts = [mount for mount in map(_parse, lines) if place.is_relative_to(mount.folder)]
    # The last filesystem mounted on a folder hides the others.
    return max(reversed(mounts), key=lambda mount: len(mount.folder.parts))


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    folder = _OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split(" ")[4])
    return Mount(Path(folder), after.split(" ", 1)[0])
