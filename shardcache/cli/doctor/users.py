"""Users, groups and modes in readable form."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path


def user_name(uid: int) -> str:
    """Return a user's name, or the uid if it has no name here, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name, or its gid."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def me() -> str:
    """Return the current user's name."""
    return user_name(os.geteuid())


def is_listed(gid: int) -> bool:
    """Return True if the user database lists the current user in a group, even if this login predates it."""
    try:
        user = pwd.getpwuid(os.geteuid())
        return user.pw_gid == gid or user.pw_name in grp.getgrgid(gid).gr_mem
    except KeyError:
        return False


def who_may(path: Path) -> str:
    """Return a path's owner, group and mode, such as `owner:group 0750`."""
    found = path.stat()
    return f"{user_name(found.st_uid)}:{group_name(found.st_gid)} {found.st_mode & 0o7777:04o}"


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
    group = group_name(found.st_gid)
    # Joining root's group is not a fix.
    if found.st_gid == 0 or not found.st_mode & 0o070:
        return (
            f"only its owner may access {path} ({who_may(path)})",
            "shardcache serve --group NAME   # the group of the training users",
        )
    if is_listed(found.st_gid):
        return f"{me()} joined the group {group} after this login began", f"newgrp {group}   # or log in again"
    cause = f"{path} is {who_may(path)}, and {me()} is neither its owner nor in its group"
    return cause, f"usermod -aG {group} {me()}   # as root; then log in again"
