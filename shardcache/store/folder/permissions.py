"""Check that nobody but the daemon's user can write where the daemon reads and writes.

`CacheFolder` calls `check_writers` before it uses a folder. Another user who can write there could
replace files, or have the daemon follow a symbolic link to a file that it should not write.
"""

import grp
import os
import shlex
import stat
from pathlib import Path

from shardcache.shared.exceptions import CacheDirError
from shardcache.shared.units import group_name, user_name
from shardcache.store.folder.layout import Layout


def other_writers(path: Path, uid: int) -> str:
    """Return who may write to a folder, other than one user and root.

    Two cases do not count: the user's own group, which distributions create for each user; and a
    folder with the sticky bit, where others may add files, but neither remove nor replace the
    user's files. Looking up names may query a directory server.

    Args:
        uid: id of the user.

    Returns:
        the subject of a sentence, such as "group staff"; empty if nobody else may write.

    Raises OSError.
    """
    status = path.stat()
    if status.st_uid not in (0, uid):
        return f"user {user_name(status.st_uid)}, its owner,"
    if status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if status.st_mode & stat.S_IWGRP and not _is_group_of_one(status.st_gid, uid):
        return f"group {group_name(status.st_gid)}"
    return ""


def _is_group_of_one(gid: int, uid: int) -> bool:
    """Return whether a group has the user's or root's name, and no other members."""
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        # The group has no name, as is usual in containers, and its members are unknown. So only
        # this process's group is taken for the user's own.
        return gid == os.getegid()
    names = {user_name(uid), user_name(0)}
    return group.gr_name in names and names.issuperset(group.gr_mem)


def check_writers(layout: Layout) -> None:
    """Raise CacheDirError if another user can write where the daemon does, or owns a file there.

    If that file is a link, the daemon would follow it. If it is a folder, its owner could replace
    the files in it at any time.
    """
    root, *folders = layout.folders()
    folders.append(layout.catalogue)
    files = (layout.pins, layout.format, layout.format_copy, layout.probe)
    # The root is not among these: a link to it may be anybody's. `_check_only_writer` checks the
    # owner of the link's target.
    for path in (*folders, *files):
        _check_owner(path, root)
    for folder in (root, *folders):
        _check_only_writer(folder, root)


def _check_only_writer(folder: Path, root: Path) -> None:
    """Raise CacheDirError if a folder exists and another user can write to it.

    Args:
        root: the cache folder, for the remedy.
    """
    try:
        who = other_writers(folder, os.geteuid())
    except (FileNotFoundError, NotADirectoryError):
        return
    if who:
        quoted_folder = shlex.quote(str(folder))
        quoted_subfolder = shlex.quote(str(root / "shardcache"))
        raise CacheDirError(
            f"{who} can write to {folder}, and replace what the daemon reads and writes there",
            remedy=f"let nobody else write there (chmod go-w {quoted_folder}, and chown if "
            "it is not this user's), or choose a folder that the daemon creates for itself: "
            f"--cache-dir {quoted_subfolder}",
        )


def _check_owner(path: Path, root: Path) -> None:
    """Raise CacheDirError if a file, folder or link exists and belongs to another user.

    Args:
        root: the cache folder, for the remedy.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if status.st_uid not in (0, os.geteuid()):
        verb = "is a link of" if stat.S_ISLNK(status.st_mode) else "belongs to"
        raise CacheDirError(
            f"{path} {verb} another user, who can write to the cache folder",
            remedy="remove it, or change its owner if it is the daemon's own "
            f"(chown -R {os.geteuid()}), and let nobody else write there "
            f"(chmod go-w {shlex.quote(str(root))}); or choose another --cache-dir",
        )
