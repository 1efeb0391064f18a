"""The cache folder of a node's tier: its parts survive a restart, but not a crash of the machine.

A part is a range of an object, which nginx caches in a file. `node_tier` calls `prepare` before
nginx starts, and `finish` after nginx has ended.
"""

import os
import pwd
import shutil
from pathlib import Path

from shardcache.shared.exceptions import ConfigError
from shardcache.store.disk.file_operations import fsync_path

PARTS = "parts"
"""Name of the folder of the parts, in the cache folder."""

_CURRENT_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LAST_BOOT_ID = "boot"  # file with the kernel's id of the boot in which the folder was last used
_CLEAN = "clean"  # file that exists only while the tier is cleanly stopped


def make_folder(folder: Path, mode: int, user: str) -> None:
    """Create a folder unless it exists.

    A folder that root creates is given to `user` and the user's group. Raises OSError, and
    ConfigError if there is no such user.

    Args:
        folder: path of the folder.
        mode: permissions of the new folder.
        user: user of nginx's workers.
    """
    if folder.exists():
        return
    group_id = _group_of(user) if os.geteuid() == 0 else None
    folder.mkdir(parents=True, mode=0o700)
    folder.chmod(mode)
    if group_id is not None:
        shutil.chown(folder, user, group_id)


def _group_of(user: str) -> int:
    """Return the id of a user's group. Raises ConfigError if there is no such user."""
    try:
        return pwd.getpwnam(user).pw_gid
    except KeyError:
        raise ConfigError(
            f"there is no user {user!r}",
            remedy="correct --user or create the user",
        ) from None


def prepare(folder: Path, boot_id: str | None = None) -> bool:
    """Make a cache folder ready for use; return True if its parts were removed.

    After a power loss, files may lack bytes that never reached the disk. Parts are kept only if
    this machine has not booted since they were written, or if the tier was stopped before the boot.

    Args:
        folder: the cache folder.
        boot_id: the kernel's id of the current boot; None to ask the kernel.
    """
    if boot_id is None:
        boot_id = _CURRENT_BOOT_ID.read_text().strip()
    boot_file = folder / _LAST_BOOT_ID
    clean_mark = folder / _CLEAN
    parts = folder / PARTS
    last_boot_id = boot_file.read_text() if boot_file.exists() else None
    may_be_torn = last_boot_id != boot_id and not clean_mark.exists()
    must_clear = parts.exists() and may_be_torn
    if must_clear:
        shutil.rmtree(parts)
    boot_file.write_text(boot_id)
    clean_mark.unlink(missing_ok=True)
    fsync_path(folder)  # else the mark might be there again after a power loss
    return must_clear


def finish(folder: Path) -> None:
    """Mark a folder as cleanly stopped, after all of its files have reached the disk."""
    os.sync()
    (folder / _CLEAN).touch()
    fsync_path(folder)
