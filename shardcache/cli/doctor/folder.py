"""The cache folder: on what kind of filesystem it is, who may use it, and who holds it."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from shardcache.cache.origin_probe.findings import Finding, failed, of_error, ok, skipped, warning
from shardcache.cli.doctor.blocking import in_thread
from shardcache.cli.doctor.case import Case
from shardcache.cli.doctor.mounts import mount_of, nearest
from shardcache.cli.doctor.people import barrier, me, user_name, way_in, who_may
from shardcache.errors import CacheFormatError
from shardcache.store import folder_format
from shardcache.store.layout import Layout

_NETWORK = re.compile("nfs|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|orangefs|pvfs|fuse(?!blk)")
_MEMORY = ("tmpfs", "ramfs")
_LOCAL = "shardcache serve --cache-dir /path/on/local/disk"


async def examine(case: Case) -> list[Finding]:
    """Look at the folder from outside; nothing is written."""
    folder = case.cache_dir
    if folder is None:
        return [skipped("cache.folder", "no daemon and no options say where it is")]
    return await in_thread(_examine, case, folder)


def _examine(case: Case, folder: Path) -> list[Finding]:
    if not case.is_operators:
        return [_readable(folder)]
    return [_usable(case, folder), *_format(folder), _filesystem(folder), *_holder(case, folder)]


def _readable(folder: Path) -> Finding:
    """Training processes open the daemon's files by their paths."""
    name = "cache.folder"
    closed = barrier(folder, os.R_OK | os.X_OK)
    if closed is None:
        return ok(name, f"{folder} is there, and {me()} may read it")
    if not closed.exists():
        cause = "readers open the daemon's files by their path; in a container, the folder is not mounted"
        return failed(
            name,
            f"{folder} is not there",
            cause,
            f"docker run -v {folder}:{folder}:ro …",
        )
    cause, remedy = way_in(closed)
    return failed(name, f"{me()} may not read {folder}", cause, remedy)


def _usable(case: Case, folder: Path) -> Finding:
    name, place = "cache.folder", nearest(folder)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        mounted = mount_of(place).folder
        cause = f"the filesystem at {mounted} is mounted read-only; dmesg says whether the kernel did it after an error"
        return failed(name, f"{folder} cannot be written", cause, f"mount -o remount,rw {shlex.quote(str(mounted))}")
    if not place.is_dir():
        return failed(
            name,
            f"{place} is no folder",
            "the cache needs one",
            f"rm {shlex.quote(str(place))}   # or another --cache-dir",
        )
    if barrier(place, os.R_OK | os.W_OK | os.X_OK) is not None:
        return _closed(folder, place)
    return ok(name, f"{folder} will be made") if place != folder else _owned(case, folder)


def _closed(folder: Path, place: Path) -> Finding:
    cause = f"{place} is for {who_may(place)}, and the daemon would run as {me()}"
    remedy = f"install -d -o {me()} -m 0750 {shlex.quote(str(folder))}   # as root"
    if place == folder:
        remedy = f"chown -R {me()} {shlex.quote(str(folder))}   # as root"
    return failed("cache.folder", f"{me()} may not write {folder}", cause, remedy)


def _owned(case: Case, folder: Path) -> Finding:
    name, layout = "cache.folder", Layout(folder)
    running = None if case.running is None else case.running.uid
    uid = os.geteuid() if running is None else running
    parts = (folder, layout.shards, layout.partial, layout.quarantine, layout.catalogue)
    alien = next((part for part in parts if part.exists() and part.stat().st_uid != uid), None)
    quoted = shlex.quote(str(folder))
    if alien is None and folder.stat().st_mode & 0o002:
        cause = f"everybody on this node may write there ({who_may(folder)})"
        return warning(name, f"{folder} is open to all", cause, f"chmod o-w {quoted}")
    if alien is None:
        return ok(name, f"{folder} ({who_may(folder)})")
    owner, user = user_name(alien.stat().st_uid), user_name(uid)
    cause = f"{alien} belongs to {owner}; a daemon that ran as {owner} made it, or it was copied"
    if running is None and uid == 0:
        remedy = f"chown -R {user} {quoted}   # or start the daemon as {owner}"
        return warning(name, f"{folder} is another user's", cause, remedy)
    return failed(name, f"{folder} is not the daemon's own", cause, f"chown -R {user} {quoted}   # as root")


def _format(folder: Path) -> list[Finding]:
    """What a newer release wrote, the daemon leaves alone, and ends."""
    try:
        folder_format.check(Layout(folder))
    except CacheFormatError as exn:
        return [of_error("cache.format", exn, "the daemon does not start with it")]
    return []


def _filesystem(folder: Path) -> Finding:
    name, mount = "cache.filesystem", mount_of(nearest(folder))
    found = f"{mount.kind} at {mount.folder}"
    if _NETWORK.match(mount.kind):
        cause = "over a network each read costs what the cache is there to save, and a lock may not hold on every node"
        return warning(name, found, cause, _LOCAL)
    if mount.kind in _MEMORY:
        cause = "shards there take the node's memory, and a restart of the node loses them"
        return warning(name, found, cause, _LOCAL)
    if mount.kind == "overlay":
        cause = "this is the container's own layer: slow, small, and gone with the container"
        return warning(name, found, cause, f"docker run -v /nvme/shardcache:{folder} …   # a folder of the node")
    return ok(name, found)


def _holder(case: Case, folder: Path) -> list[Finding]:
    """A daemon holds its folder by a lock, also one that listens at another socket."""
    pid = _locked_by(folder)
    if pid is None or case.running is not None:
        return []
    cause = "a daemon that listens at another socket, or has not begun to, has it; two cannot share one"
    remedy = f"ps -fp {pid}   # stop it, use its socket, or choose another --cache-dir"
    return [failed("cache.holder", f"{folder} is held by process {pid}", cause, remedy)]


def _locked_by(folder: Path) -> int | None:
    """Return who has locked it by flock(2). To try the lock would keep out a daemon that starts in this instant."""
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
