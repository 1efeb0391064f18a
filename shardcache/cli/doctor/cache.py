"""Checks of the cache folder: its permissions, format and holder, its filesystem's space, and its disk's speed."""

from __future__ import annotations

import mmap
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardcache.cli.doctor.context import Context
from shardcache.cli.doctor.findings import Finding, failed, of_error, ok, skipped, warning
from shardcache.cli.doctor.paths import barrier, me, mount_of, nearest, way_in, who_may
from shardcache.cli.output import count
from shardcache.config import Settings
from shardcache.errors import CacheFormatError
from shardcache.store.folder import Layout
from shardcache.units import size, user_name

_NETWORK = re.compile("nfs|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|orangefs|pvfs|fuse(?!blk)")
_MEMORY = ("tmpfs", "ramfs")
_LOCAL = "shardcache serve --cache-dir /path/on/local/disk"

# The catalogue's files, and a few shards being fetched.
_SOME_INODES = 64
# A shard and its sidecar; shards usually have 100 MB to 1 GB, a few are smaller.
_INODES_PER_SHARD = 2
_SMALL_SHARD_BYTES = 32 * 1024**2

_BLOCK_BYTES = 4 * 1024**2
_MOST_BYTES = 256 * 1024**2
_LIMIT_S = 2.0
# Slower than a single hard disk: the node is better off without a cache, or its disk is failing.
_SLOW_BYTES_PER_S = 100e6


def folder(context: Context) -> Finding:
    """Check that the daemon can write to the folder or create it, or that a reader can read it."""
    place = context.cache_dir
    if place is None:
        return skipped("unknown: no daemon answers, and there are no valid options")
    return _writable(context, place) if context.is_operator else _readable(place)


def _readable(folder: Path) -> Finding:
    """Check that the current user can read the folder: training processes open the daemon's files by path."""
    closed = barrier(folder, os.R_OK | os.X_OK)
    if closed is None:
        return ok(f"{folder} exists, and {me()} may read it")
    if not closed.exists():
        cause = "readers open the daemon's files by path; in a container, the folder must be mounted at the same path"
        return failed(f"{folder} does not exist", cause, f"docker run -v {folder}:{folder}:ro …")
    cause, remedy = way_in(closed)
    return failed(f"{me()} may not read {folder}", cause, remedy)


def _writable(context: Context, folder: Path) -> Finding:
    place = nearest(folder)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        mounted = mount_of(place).folder
        cause = f"the filesystem at {mounted} is mounted read-only; dmesg shows if the kernel did it after an error"
        return failed(f"{folder} is not writable", cause, f"mount -o remount,rw {shlex.quote(str(mounted))}")
    if not place.is_dir():
        remedy = f"rm {shlex.quote(str(place))}   # or another --cache-dir"
        return failed(f"{place} is not a folder", "the cache needs a folder", remedy)
    if barrier(place, os.R_OK | os.W_OK | os.X_OK) is not None:
        cause = f"{place} is {who_may(place)}, and the daemon would run as {me()}"
        command = f"chown -R {me()}" if place == folder else f"install -d -o {me()} -m 0750"
        return failed(f"{me()} may not write to {folder}", cause, f"{command} {shlex.quote(str(folder))}   # as root")
    return _owned(context, folder) if place == folder else ok(f"{folder} will be created")


def _owned(context: Context, folder: Path) -> Finding:
    layout, quoted = Layout(folder), shlex.quote(str(folder))
    uid = os.geteuid() if context.uid is None else context.uid
    parts = (folder, layout.shards, layout.partial, layout.quarantine, layout.catalogue)
    alien = next((part for part in parts if part.exists() and part.stat().st_uid != uid), None)
    if alien is not None:
        found, owner = f"{folder} belongs to another user", user_name(alien.stat().st_uid)
        cause = f"{alien} belongs to {owner}: a daemon that ran as {owner} created it, or it was copied"
        command = f"chown -R {user_name(uid)} {quoted}"
        if context.uid is None and uid == 0:
            return warning(found, cause, f"{command}   # or start the daemon as {owner}")
        return failed(found, cause, f"{command}   # as root")
    if folder.stat().st_mode & 0o002:
        cause = f"every user of this node may write to it ({who_may(folder)})"
        return warning(f"{folder} is world-writable", cause, f"chmod o-w {quoted}")
    return ok(f"{folder} ({who_may(folder)})")


def folder_format(context: Context) -> Finding | None:
    """Check the folder's format: the daemon refuses to start on a folder written by a newer release."""
    if context.own_cache_dir is not None:
        try:
            Layout(context.own_cache_dir).check_format()
        except CacheFormatError as exn:
            return of_error(exn, "the daemon does not start with it")
    return None


def filesystem(context: Context) -> Finding | None:
    """Check that the filesystem is a local disk's."""
    folder = context.own_cache_dir
    if folder is None:
        return None
    mount = mount_of(nearest(folder))
    found = f"{mount.kind} at {mount.folder}"
    if _NETWORK.match(mount.kind):
        cause = "every read goes over the network, which the cache should avoid, and locks may not work across nodes"
        return warning(found, cause, _LOCAL)
    if mount.kind in _MEMORY:
        return warning(found, "shards there use the node's memory, and are lost when the node restarts", _LOCAL)
    if mount.kind == "overlay":
        cause = "this is the container's own layer: slow, small, and deleted with the container"
        return warning(found, cause, f"docker run -v /nvme/shardcache:{folder} …   # a folder of the node")
    return ok(found)


def holder(context: Context) -> Finding | None:
    """Check that no other daemon holds the folder's lock, such as one at another socket."""
    folder = context.own_cache_dir
    if folder is None or context.status is not None or (pid := _locked_by(folder)) is None:
        return None
    cause = "a daemon that listens at another socket, or is still starting, uses it; two daemons cannot share a folder"
    remedy = f"ps -fp {pid}   # stop it, use its socket, or choose another --cache-dir"
    return failed(f"{folder} is locked by process {pid}", cause, remedy)


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


@dataclass(frozen=True, slots=True)
class _Disk:
    """Space and inodes of the cache's filesystem, and the cache's limits on it; `total_inodes` is 0 if unlimited."""

    folder: Path
    total_bytes: int
    free_bytes: int
    total_inodes: int
    free_inodes: int
    capacity_bytes: int
    min_free_bytes: int
    used_bytes: int

    @property
    def reachable_bytes(self) -> int:
        """Size to which the cache can grow with the current free space."""
        return max(0, self.used_bytes + self.free_bytes - self.min_free_bytes)


def _disk(context: Context) -> _Disk | None:
    """Return the disk of the user's own cache; None if there is none, or its limits are unknown."""
    folder, settings = context.own_cache_dir, context.settings
    if folder is None or settings is None:
        return None
    stat = os.statvfs(nearest(folder))
    total_bytes = stat.f_blocks * stat.f_frsize
    return _Disk(
        folder,
        total_bytes=total_bytes,
        free_bytes=stat.f_bavail * stat.f_frsize,
        total_inodes=stat.f_files,
        free_inodes=stat.f_favail,
        capacity_bytes=(
            context.status["cache"]["capacity_bytes"] if context.status else settings.capacity.of(total_bytes)
        ),
        min_free_bytes=settings.min_free.of(total_bytes),
        used_bytes=context.used_bytes,
    )


def space(context: Context) -> Finding:
    """Compare free space with the cache's capacity and --min-free."""
    if not context.is_operator:
        return skipped("only the daemon's operator can change it")
    if (disk := _disk(context)) is None:
        return skipped("without valid options, capacity and --min-free are unknown")
    reachable_bytes, capacity_bytes = disk.reachable_bytes, disk.capacity_bytes
    limits = f"cache {size(disk.used_bytes)}, capacity {size(capacity_bytes)}, --min-free {size(disk.min_free_bytes)}"
    found = f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free; {limits}"
    figures = {"free_bytes": disk.free_bytes, "reachable_bytes": reachable_bytes}
    largest = f"du -xh --max-depth=2 {shlex.quote(str(mount_of(nearest(disk.folder)).folder))} | sort -h | tail"
    if not reachable_bytes:
        cause = "free space is below --min-free, so nothing is fetched"
        return failed(found, cause, f"{largest}   # remove unneeded files, or lower --min-free", figures=figures)
    if reachable_bytes >= capacity_bytes:
        return ok(found, figures=figures)
    if disk.total_bytes - disk.min_free_bytes < capacity_bytes:
        cause = f"the filesystem is too small for the capacity: the cache can grow to {size(reachable_bytes)}"
        remedy = f"shardcache serve --capacity {_rounded(reachable_bytes)}   # or a larger disk"
        return warning(found, cause, remedy, figures=figures)
    cause = f"other files use the rest: the cache can grow to {size(reachable_bytes)}"
    return warning(found, cause, f"{largest}   # remove unneeded files", figures=figures)


def _rounded(value_bytes: int) -> str:
    """Return a size as options take it, rounded down."""
    return f"{value_bytes // 10**9}GB" if value_bytes >= 10**10 else f"{value_bytes // 10**6}MB"


def inodes(context: Context) -> Finding | None:
    """Compare free inodes with the number of files that the cache may have."""
    if (disk := _disk(context)) is None:
        return None
    if not disk.total_inodes:
        return ok("allocated by the filesystem as needed")
    free, found = disk.free_inodes, f"{count(disk.free_inodes, 'inode')} of {disk.total_inodes:,} free"
    layout = Layout(disk.folder)
    needed = _SOME_INODES + (0 if layout.shards.is_dir() else len(layout.folders()))
    if free < needed:
        cause = f"the cache's folders and transfers need {needed:,}"
        return failed(found, cause, "mkfs.ext4 -i 65536 DEVICE   # reformat with more inodes; or remove files")
    shards = (min(disk.capacity_bytes, disk.reachable_bytes) - disk.used_bytes) // _SMALL_SHARD_BYTES
    if free < _INODES_PER_SHARD * shards:
        cause = f"a cache of shards smaller than {size(disk.capacity_bytes / max(1, free // 2))} would use them up"
        return warning(found, cause, "mkfs.ext4 -i 65536 DEVICE   # reformat with more inodes")
    return ok(found, figures={"free_inodes": free})


def speed(context: Context) -> Finding | list[Finding]:
    """Write an unnamed file for at most two seconds, and read it back, bypassing the page cache."""
    if context.quick:
        return skipped("not measured with --quick")
    if context.own_cache_dir is None:
        return skipped("you may not write to the cache folder")
    folder = nearest(context.own_cache_dir)
    most_bytes = _spare_bytes(folder, context.settings)
    if not most_bytes:
        return skipped("not enough free space to measure")
    try:
        with _unnamed(folder) as (fd, direct):
            written_bytes, written_s = _transfer(fd, most_bytes, os.pwritev, sync=True)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read_bytes, read_s = _transfer(fd, written_bytes, os.preadv, sync=False)
    except OSError as exn:
        return failed(f"cannot write to {folder}", exn.strerror or str(exn), "dmesg | tail -50")
    way = "O_DIRECT" if direct else "fsync, then read after dropping the page cache"
    return [
        _judge(written_bytes / written_s, f"written with {way}"),
        _judge(read_bytes / read_s, f"read with {way}").named("disk.read"),
    ]


def _spare_bytes(folder: Path, settings: Settings | None) -> int:
    """Return how many bytes may be written, few enough that a running daemon would not evict shards for them."""
    stat = os.statvfs(folder)
    kept_bytes = 0 if settings is None else settings.min_free.of(stat.f_blocks * stat.f_frsize)
    spare_bytes = max(0, stat.f_bavail * stat.f_frsize - kept_bytes) // 4
    return min(_MOST_BYTES, spare_bytes) // _BLOCK_BYTES * _BLOCK_BYTES


@contextmanager
def _unnamed(folder: Path) -> Iterator[tuple[int, bool]]:
    """Yield the descriptor of an unnamed file, and True if it bypasses the page cache."""
    with tempfile.TemporaryFile(dir=folder, prefix="doctor-", buffering=0) as file:
        direct = None
        with suppress(OSError):  # no O_DIRECT on this filesystem, or no /proc
            direct = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        try:
            yield (file.fileno(), False) if direct is None else (direct, True)
        finally:
            if direct is not None:
                os.close(direct)


def _transfer(
    fd: int, most_bytes: int, move: Callable[[int, list[mmap.mmap], int], int], *, sync: bool
) -> tuple[int, float]:
    """Write or read block by block until the time limit; return the bytes moved, and the seconds that it took."""
    with mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned, as O_DIRECT requires
        block.write(os.urandom(_BLOCK_BYTES))  # incompressible, as some disks compress
        done_bytes, began_s = 0, time.monotonic()
        while done_bytes < most_bytes and time.monotonic() - began_s < _LIMIT_S:
            done_bytes += move(fd, [block], done_bytes)
        if sync:
            os.fsync(fd)
        return done_bytes, time.monotonic() - began_s


def _judge(bytes_per_s: float, way: str) -> Finding:
    found, figures = f"{size(bytes_per_s)}/s in one stream, {way}", {"bytes_per_s": round(bytes_per_s)}
    if bytes_per_s >= _SLOW_BYTES_PER_S:
        return ok(found, figures=figures)
    cause = "slower than one hard disk: a network volume, a throttled volume, or a disk kept busy by others"
    remedy = "iostat -x 1 5   # is it busy? if not, use a local NVMe: --cache-dir"
    return warning(found, cause, remedy, figures=figures)
