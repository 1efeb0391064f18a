"""Facts about paths: who may access them, and the filesystem that they are on."""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardcache.units import user_name

_OCTAL = re.compile(r"\\([0-7]{3})")


def me() -> str:
    """Return the current user's name."""
    return user_name(os.geteuid())


def who_may(path: Path) -> str:
    """Return a path's owner, group and mode, such as `owner:group 0750`."""
    found = path.stat()
    return f"{user_name(found.st_uid)}:{_group_name(found.st_gid)} {found.st_mode & 0o7777:04o}"


def barrier(path: Path, mode: int) -> Path | None:
    """Return the folder on the way, or the path itself, that the current user may not access; None if there is none.

    Args:
        mode: access mode of `os.access` for the path itself.
    """
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK):
            return folder
    return None if os.access(path, mode) else path


def way_in(path: Path) -> tuple[str, str]:
    """Return the reason that the current user may not access a path, and the command that fixes it."""
    found = path.stat()
    group = _group_name(found.st_gid)
    # Joining root's group is not a fix.
    if found.st_gid == 0 or not found.st_mode & 0o070:
        cause = f"only its owner may access {path} ({who_may(path)})"
        return cause, "shardcache serve --group NAME   # the group of the training users"
    cause = f"{path} is {who_may(path)}, and {me()} is neither its owner nor in its group"
    return cause, f"usermod -aG {group} {me()}   # as root; then log in again"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


class Mount(NamedTuple):
    """A mounted filesystem: its mount point and type."""

    folder: Path
    kind: str


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


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
