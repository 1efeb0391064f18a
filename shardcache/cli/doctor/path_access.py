"""Rights of access to a path, in words, and the command that gives them."""

import os
from pathlib import Path

from shardcache.cli.doctor.context import me
from shardcache.shared.units import group_name, user_name


def who_may(path: Path) -> str:
    """Return a path's owner, group and mode, such as `owner:group 0750`."""
    found = path.stat()
    return f"{user_name(found.st_uid)}:{group_name(found.st_gid)} {found.st_mode & 0o7777:04o}"


def barrier(path: Path, mode: int) -> Path | None:
    """Return what denies this user access to a path: a folder above it, or itself; else None.

    Args:
        path: a file's or a folder's.
        mode: the access to it that is needed, as for `os.access`.
    """
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK):
            return folder
    if not os.access(path, mode):
        return path
    return None


def way_in(path: Path) -> tuple[str, str]:
    """Return why this user may not access a path, and the command that gives access to it."""
    found = path.stat()
    group_has_rights = bool(found.st_mode & 0o070)
    if found.st_gid == 0 or not group_has_rights:  # joining root's group is not a fix
        cause = f"only its owner may access {path} ({who_may(path)})"
        return cause, "shardcache serve --group NAME   # the group of the training users"
    cause = f"{path} is {who_may(path)}, and {me()} is neither its owner nor in its group"
    return cause, f"usermod -aG {group_name(found.st_gid)} {me()}   # as root; then log in again"


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
