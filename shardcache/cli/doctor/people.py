"""Users, groups and modes as people name them."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path


def user_name(uid: int) -> str:
    """Return a user's name, or the number where it has none here, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name, or its number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def me() -> str:
    """Return the present user's name."""
    return user_name(os.geteuid())


def is_listed(gid: int) -> bool:
    """Whether the system lists the present user in a group, in which this login may not be yet."""
    try:
        user = pwd.getpwuid(os.geteuid())
        return user.pw_gid == gid or user.pw_name in grp.getgrgid(gid).gr_mem
    except KeyError:
        return False


def who_may(path: Path) -> str:
    """Return `owner:group 0750`, as `ls -ld` would say it."""
    found = path.stat()
    return f"{user_name(found.st_uid)}:{group_name(found.st_gid)} {found.st_mode & 0o7777:04o}"


def barrier(path: Path, mode: int) -> Path | None:
    """Return what keeps the present user from a path: a folder on the way, or the path itself; None where nothing does.

    Args:
        mode: of `os.access`, for the path itself.
    """
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK):
            return folder
    return None if os.access(path, mode) else path


def way_in(path: Path) -> tuple[str, str]:
    """Return why the present user may not use what stands in the way, and the command that changes it."""
    found = path.stat()
    group = group_name(found.st_gid)
    # Nobody joins root's group to train a model.
    if found.st_gid == 0 or not found.st_mode & 0o070:
        return (
            f"{path} is for its owner alone ({who_may(path)})",
            "shardcache serve --group NAME   # of those who train",
        )
    if is_listed(found.st_gid):
        return f"{me()} joined the group {group} after this login began", f"newgrp {group}   # or log in again"
    cause = f"{path} is for {who_may(path)}, and {me()} is neither its owner nor in its group"
    return cause, f"usermod -aG {group} {me()}   # as root; then log in again"
