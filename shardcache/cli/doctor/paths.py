"""Facts about paths: who may access them."""

from __future__ import annotations

import grp
import os
from pathlib import Path

from shardcache.units import user_name


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


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
