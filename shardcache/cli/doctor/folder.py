"""Checks of the cache folder: its filesystem, permissions, format, and the daemon holding it."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from shardcache.cache.operations.origin_probe.findings import Finding, failed, of_error, ok, skipped, warning
from shardcache.cli.doctor.blocking import in_thread
from shardcache.cli.doctor.context import Case
from shardcache.cli.doctor.mounts import mount_of, nearest
from shardcache.cli.doctor.users import barrier, me, user_name, way_in, who_may
from shardcache.errors import CacheFormatError
from shardcache.store.folder import format as folder_format
from shardcache.store.folder.layout import Layout

_NETWORK = re.compile("nfs|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|orangefs|pvfs|fuse(?!blk)")
_MEMORY = ("tmpfs", "ramfs")
_LOCAL = "shardcache serve --cache-dir /path/on/local/disk"


async def examine(case: Case) -> list[Finding]:
    """Inspect the folder without writing to it."""
    folder = case.cache_dir
    if folder is None:
        return [skipped("cache.folder", "unknown: no daemon answers, and there are no valid options")]
    return await in_thread(_examine, case, folder)


def _examine(case: Case, folder: Path) -> list[Finding]:
    if not case.is_operators:
        return [_readable(folder)]
    return [_usable(case, folder), *_format(folder), _filesystem(folder), *_holder(case, folder)]


def _readable(folder: Path) -> Finding:
    """Check that the current user can read the folder: training processes open the daemon's files by path."""
    name = "cache.folder"
    closed = barrier(folder, os.R_OK | os.X_OK)
    if closed is None:
        return ok(name, f"{folder} exists, and {me()} may read it")
    if not closed.exists():
        cause = "readers open the daemon's files by path; in a container, the folder must be mounted at the same path"
        return failed(
            name,
            f"{folder} does not exist",
            cause,
            f"docker run -v {folder}:{folder}:ro …",
        )
    cause, remedy = way_in(closed)
    return failed(name, f"{me()} may not read {folder}", cause, remedy)


def _usable(case: Case, folder: Path) -> Finding:
    name, place = "cache.folder", nearest(folder)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        mounted = mount_of(place).folder
        cause = f"the filesystem at {mounted} is mounted read-only; dmesg shows if the kernel did it after an error"
        return failed(name, f"{folder} is not writable", cause, f"mount -o remount,rw {shlex.quote(str(mounted))}")
    if not place.is_dir():
        return failed(
            name,
            f"{place} is not a folder",
            "the cache needs a folder",
            f"rm {shlex.quote(str(place))}   # or another --cache-dir",
        )
    if barrier(place, os.R_OK | os.W_OK | os.X_OK) is not None:
        return _closed(folder, place)
    return ok(name, f"{folder} will be created") if place != folder else _owned(case, folder)


def _closed(folder: Path, place: Path) -> Finding:
    cause = f"{place} is {who_may(place)}, and the daemon would run as {me()}"
    remedy = f"install -d -o {me()} -m 0750 {shlex.quote(str(folder))}   # as root"
    if place == folder:
        remedy = f"chown -R {me()} {shlex.quote(str(folder))}   # as root"
    return failed("cache.folder", f"{me()} may not write to {folder}", cause, remedy)


def _owned(case: Case, folder: Path) -> Finding:
    name, layout = "cache.folder", Layout(folder)
    running = None if case.running is None else case.running.uid
    uid = os.geteuid() if running is None else running
    parts = (folder, layout.shards, layout.partial, layout.quarantine, layout.catalogue)
    alien = next((part for part in parts if part.exists() and part.stat().st_uid != uid), None)
    quoted = shlex.quote(str(folder))
    if alien is None and folder.stat().st_mode & 0o002:
        cause = f"every user of this node may write to it ({who_may(folder)})"
        return warning(name, f"{folder} is world-writable", cause, f"chmod o-w {quoted}")
    if alien is None:
        return ok(name, f"{folder} ({who_may(folder)})")
    owner, user = user_name(alien.stat().st_uid), user_name(uid)
    cause = f"{alien} belongs to {owner}: a daemon that ran as {owner} created it, or it was copied"
    if running is None and uid == 0:
        remedy = f"chown -R {user} {quoted}   # or start the daemon as {owner}"
        return warning(name, f"{folder} belongs to another user", cause, remedy)
    return failed(name, f"{folder} belongs to another user", cause, f"chown -R {user} {quoted}   # as root")


def _format(folder: Path) -> list[Finding]:
    """Check the folder's format: the daemon refuses to start on a folder written by a newer release."""
    try:
        folder_format.check(Layout(folder))
    except CacheFormatError as exn:
        return [of_error("cache.format", exn, "the daemon does not start with it")]
    return []


def _filesystem(folder: Path) -> Finding:
    name, mount = "cache.filesystem", mount_of(nearest(folder))
    found = f"{mount.kind} at {mount.folder}"
    if _NETWORK.match(mount.kind):
        cause = "every read goes over the network, which the cache should avoid, and locks may not work across nodes"
        return warning(name, found, cause, _LOCAL)
    if mount.kind in _MEMORY:
        cause = "shards there use the node's memory, and are lost when the node restarts"
        return warning(name, found, cause, _LOCAL)
    if mount.kind == "overlay":
        cause = "this is the container's own layer: slow, small, and deleted with the container"
        return warning(name, found, cause, f"docker run -v /nvme/shardcache:{folder} …   # a folder of the node")
    return ok(name, found)


def _holder(case: Case, folder: Path) -> list[Finding]:
    """Check that no other daemon holds the folder's lock, such as one at another socket."""
    pid = _locked_by(folder)
    if pid is None or case.running is not None:
        return []
    cause = "a daemon that listens at another socket, or is still starting, uses it; two daemons cannot share a folder"
    remedy = f"ps -fp {pid}   # stop it, use its socket, or choose another --cache-dir"
    return [failed("cache.holder", f"{folder} is locked by process {pid}", cause, remedy)]


def _locked_by(folder: Path) -> int | None:
    """Return the process that holds the flock(2). Trying the lock instead could block a daemon starting right now."""
    try:
        found, locks = folder.stat(), Path("/proc/locks").read_text()
    except OSError:
        return None
    where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in locks.splitlines():
        _, kind, _, _, pid, place, *_ = line.replace("->", "").split()
        if (kind, place) == ("FLOCK", where):
            return int(pid)
    return None
