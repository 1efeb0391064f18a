"""Permissions of a path as text, and the command that gives the current user access to it.

The checks of `shardcache doctor` use these functions.
"""

import os
import stat
from pathlib import Path

from shardcache.cli.doctor.context import this_user
from shardcache.shared.units import group_name, user_name


def permissions_of(path: Path) -> str:
    """Return a path's owner, group and mode, such as `owner:group 0750`."""
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    return f"{user_name(status.st_uid)}:{group_name(status.st_gid)} {mode:04o}"


def blocking_path(path: Path, mode: int) -> Path | None:
    """Return the first path on the way to `path` that denies this user access, or does not exist.

    It is `path` itself or a folder above it; None if this user has access.

    Args:
        path: path of a file or folder.
        mode: the access that is needed, as for `os.access`.
    """
    for folder in reversed(path.parents):  # from the root down
        if not os.access(folder, os.X_OK):
            return folder
    if not os.access(path, mode):
        return path
    return None


def access_fix(path: Path) -> tuple[str, str]:
    """Return the reason why this user may not access a path, and the command that gives access."""
    status = path.stat()
    is_roots_group = status.st_gid == 0
    has_group_rights = bool(status.st_mode & stat.S_IRWXG)
    if is_roots_group or not has_group_rights:  # joining the group would not help
        cause = f"only its owner may access {path} ({permissions_of(path)})"
        return cause, "shardcache serve --group NAME   # the group of the training users"
    user = this_user()
    group = group_name(status.st_gid)
    cause = f"{path} is {permissions_of(path)}, and {user} is neither its owner nor in its group"
    return cause, f"usermod -aG {group} {user}   # as root; then log in again"


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
