"""Folders of this user's private caches: their base on a local disk, and the choice of one.

`private_daemon` calls these functions. A private cache is the cache of a private daemon, which
serves one user. The base is the folder of all private caches of this user. A cache folder in it is
named after the digest, a keyed hash, of the daemon's credentials, so that daemons with different
credentials have different caches; further folders for the same credentials have a number. A place
is the set of a daemon's files in a folder: its socket, log and lock.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shardcache.shared.exceptions import CacheDirError, DaemonError
from shardcache.shared.private import (
    PrivatePlace,
    is_environment_digest,
    is_file_limit,
    is_listening,
    secured,
    try_lock,
)
from shardcache.store.disk.mounts import mount_of

BASE_LOCK = "folders.lock"
"""Name of a file in the base.

The file is locked from the choice of a cache folder until the daemon has locked that folder.
"""

# Maximum number of a user's daemons on a node that have the same credentials. There may be several,
# since daemons in containers do not see each other's sockets.
_MAX_FOLDERS = 16
# A cache of other credentials is removed if it has not been used for this time.
_OLD_S = 86_400.0
# Variables in which schedulers name a job's folder on the node's own disk.
_SCRATCH_VARIABLES = ("SLURM_TMPDIR", "PBS_JOBFS", "_CONDOR_SCRATCH_DIR", "LSF_TMPDIR")
# Variables that schedulers set in each job; TMPDIR is then the job's folder, too.
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "SGE_TASK_ID")
_SHARED_FOLDERS = ("/tmp", "/var/tmp")
_WRITABLE_BY_OTHERS = 0o022


def cache_base(env: Mapping[str, str]) -> Path:
    """Return the base, which is created if it is missing. Only this user can write to it.

    The base is `$SHARDCACHE_CACHE_DIR`; else a folder in the job's own folder on a local disk, if
    its scheduler names one; else a folder in the user's cache folder. Raises CacheDirError if the
    base is on a network filesystem or cannot be used.

    Args:
        env: the environment's variables.
    """
    named = env.get("SHARDCACHE_CACHE_DIR")
    if named:
        base = Path(named).resolve()
    else:
        named_user_cache = env.get("XDG_CACHE_HOME")
        user_cache = Path(named_user_cache) if named_user_cache else Path.home() / ".cache"
        base = next(_scratch_folders(env), user_cache / "shardcache-private")
    base = base.absolute()  # the daemon changes its working folder, so relative paths would break
    mount = mount_of(base)
    if mount.is_network:
        raise CacheDirError(
            f"{base} is on a network filesystem ({mount.kind} at {mount.folder}), where a cache "
            "would gain nothing",
            remedy="export SHARDCACHE_CACHE_DIR=/path/on/local/disk",
        )
    with as_cache_dir_errors():
        return secured(base, denied=_WRITABLE_BY_OTHERS)


@contextmanager
def as_cache_dir_errors() -> Iterator[None]:
    """Turn a DaemonError from the block, which is about a cache folder, into a CacheDirError.

    The functions of `shared.private` are meant for the folder of the sockets, and the remedy of
    their errors names that folder's variable. The new error's names the variable of the cache.
    """
    try:
        yield
    except DaemonError as exn:
        # The process's limit on file sizes applies in any folder, so that error stays as it is.
        if is_file_limit(exn.__cause__):
            raise
        raise CacheDirError(
            f"no place for the cache: {exn.message}",
            remedy="export SHARDCACHE_CACHE_DIR=…, a folder of your own on a local disk",
        ) from exn


def _scratch_folders(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield a folder for the base in each local folder that a scheduler made for this job."""
    names = list(_SCRATCH_VARIABLES)
    if any(env.get(name) for name in _JOB_VARIABLES):
        names.append("TMPDIR")
    job_folders = [Path(env[name]) for name in names if env.get(name)]
    for folder in job_folders:
        # A shared folder is not used, since it outlives the job, and other users fill it.
        if str(folder) in _SHARED_FOLDERS:
            continue
        mount = mount_of(folder)
        if mount.is_network or mount.is_memory:
            continue
        if folder.is_dir() and os.access(folder, os.W_OK):
            yield folder / f"shardcache-{os.geteuid()}"


def find_running(base: Path, digest: str) -> PrivatePlace | None:
    """Return the place of a running daemon with these credentials; None if no such daemon runs.

    The place is the one in the daemon's cache folder. The daemon has another place, where processes
    look first. This function is for when that place is missing or cannot be seen: a logout removes
    `/run/user/UID`, and a job or container may have another `$XDG_RUNTIME_DIR`.

    Args:
        base: the base.
        digest: digest of the credentials.
    """
    for number in range(_MAX_FOLDERS):
        folder = base / _folder_name(digest, number)
        if not folder.is_dir():
            continue
        place = PrivatePlace.in_cache(folder, base)
        if place.is_usable and is_listening(place.socket) and place.shows_cache():
            return place
    return None


def free_folder(base: Path, digest: str) -> Path:
    """Return a cache folder for these credentials that no daemon has locked.

    The folder is created if it is missing. The caller must have locked `BASE_LOCK`: while the
    caller holds that lock, no daemon locks the folder.

    Args:
        base: the base.
        digest: digest of the credentials.
    """
    for number in range(_MAX_FOLDERS):
        folder = base / _folder_name(digest, number)
        with _try_locking(secured(folder)) as is_free:
            if is_free:
                # The folder counts as used from now on, so that `remove_old_caches` of another
                # daemon does not remove it before the new daemon has locked it.
                os.utime(folder)
                return folder
    raise CacheDirError(
        f"{_MAX_FOLDERS} private daemons already use folders in {base}",
        remedy="shardcache stop",
    )


def _folder_name(digest: str, number: int) -> str:
    """Return the name of a cache folder; the first one for a digest has no number."""
    if number == 0:
        return digest
    return f"{digest}.{number}"


@contextmanager
def _try_locking(folder: Path) -> Iterator[bool]:
    """Try to lock a cache folder for the block, as its daemon does; yield False if one has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def remove_old_caches(own: Path) -> None:
    """Remove caches of other credentials that no daemon has used for a day.

    Caches of temporary credentials are never used again once the credentials have expired.

    Args:
        own: the cache folder of this daemon, which is in the same base as the others.
    """
    base = own.parent
    for folder in base.iterdir():
        digest, _, _number = folder.name.partition(".")
        # The base may also be the folder of the sockets, in which files have such names, too.
        is_cache = is_environment_digest(digest) and folder.is_dir()
        if folder == own or not is_cache or not _is_old(folder):
            continue
        with _try_locking(folder) as is_free:
            # Checked again, since `free_folder` may have chosen the folder before it was locked.
            if is_free and _is_old(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    """Return True if no daemon has used a cache folder, or been started for it, for `_OLD_S`."""
    # `free_folder` sets the modification time of the folder, and the daemon does so when it starts
    # and ends. Transfers change that of `partial` in between.
    times_s = [path.stat().st_mtime for path in (folder, folder / "partial") if path.exists()]
    return time.time() - max(times_s) > _OLD_S
