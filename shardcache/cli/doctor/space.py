"""Checks of free space and inodes against the cache's capacity and --min-free."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from shardcache.cache.operations.origin_probe.findings import Finding, failed, ok, skipped, warning
from shardcache.cli.display.output import count
from shardcache.cli.doctor.blocking import in_thread
from shardcache.cli.doctor.context import Case
from shardcache.cli.doctor.mounts import mount_of, nearest
from shardcache.config import Settings
from shardcache.store.folder.layout import Layout
from shardcache.units import size

# The catalogue's files, and a few shards being fetched.
_SOME_INODES = 64
# A shard and its sidecar; shards usually have 100 MB to 1 GB, a few are smaller.
_INODES_A_SHARD = 2
_SMALL_SHARD_BYTES = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class Room:
    """A filesystem's space and inodes, and the cache's limits on it.

    Attributes:
        used_bytes: current size of the cache.
        inodes: 0 if the filesystem allocates them as needed.
    """

    place: Path
    total_bytes: int
    free_bytes: int
    capacity_bytes: int
    min_free_bytes: int
    used_bytes: int
    inodes: int
    free_inodes: int

    @property
    def reachable_bytes(self) -> int:
        """Size to which the cache can grow with the current free space."""
        return max(0, self.used_bytes + self.free_bytes - self.min_free_bytes)


async def examine(case: Case) -> list[Finding]:
    """Compare the limits with the disk."""
    if not case.is_operators:
        return [skipped("cache.space", "only the daemon's operator can change it")]
    if case.cache_dir is None or case.settings is None:
        return [skipped("cache.space", "without valid options, capacity and --min-free are unknown")]
    room = await in_thread(_measure, case, case.cache_dir, case.settings)
    return [_space(room), _inodes(room)]


def _measure(case: Case, folder: Path, settings: Settings) -> Room:
    stat = os.statvfs(nearest(folder))
    total_bytes = stat.f_blocks * stat.f_frsize
    known = None if case.running is None else case.running.page["cache"]
    return Room(
        place=folder,
        total_bytes=total_bytes,
        free_bytes=stat.f_bavail * stat.f_frsize,
        capacity_bytes=known["capacity_bytes"] if known else settings.capacity.of(total_bytes),
        min_free_bytes=settings.min_free.of(total_bytes),
        used_bytes=known["used_bytes"] if known else _on_disk(folder),
        inodes=stat.f_files,
        free_inodes=stat.f_favail,
    )


def _on_disk(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _space(room: Room) -> Finding:
    name, mounted = "cache.space", shlex.quote(str(mount_of(nearest(room.place)).folder))
    found = f"{size(room.free_bytes)} of {size(room.total_bytes)} free; {_limits(room)}"
    figures = {"free_bytes": room.free_bytes, "reachable_bytes": room.reachable_bytes}
    largest = f"du -xh --max-depth=2 {mounted} | sort -h | tail"
    if not room.reachable_bytes:
        cause = "free space is below --min-free, so nothing is fetched"
        return failed(name, found, cause, f"{largest}   # remove unneeded files, or lower --min-free", figures=figures)
    if room.reachable_bytes >= room.capacity_bytes:
        return ok(name, found, figures=figures)
    most = size(room.reachable_bytes)
    if room.total_bytes - room.min_free_bytes < room.capacity_bytes:
        cause = f"the filesystem is too small for the capacity: the cache can grow to {most}"
        remedy = f"shardcache serve --capacity {_rounded(room.reachable_bytes)}   # or a larger disk"
        return warning(name, found, cause, remedy, figures=figures)
    cause = f"other files use the rest: the cache can grow to {most}"
    return warning(name, found, cause, f"{largest}   # remove unneeded files", figures=figures)


def _limits(room: Room) -> str:
    return (
        f"cache {size(room.used_bytes)}, capacity {size(room.capacity_bytes)}, --min-free {size(room.min_free_bytes)}"
    )


def _rounded(value_bytes: int) -> str:
    """Return a size as options take it, rounded down."""
    return f"{value_bytes // 10**9}GB" if value_bytes >= 10**10 else f"{value_bytes // 10**6}MB"


def _inodes(room: Room) -> Finding:
    name = "cache.inodes"
    if not room.inodes:
        return ok(name, "allocated by the filesystem as needed")
    free, found = room.free_inodes, f"{count(room.free_inodes, 'inode')} of {room.inodes:,} free"
    needed = _SOME_INODES if Layout(room.place).shards.is_dir() else _SOME_INODES + len(Layout(room.place).folders())
    if free < needed:
        cause = f"the cache's folders and transfers need {needed:,}"
        return failed(name, found, cause, "mkfs.ext4 -i 65536 DEVICE   # reformat with more inodes; or remove files")
    shards = (min(room.capacity_bytes, room.reachable_bytes) - room.used_bytes) // _SMALL_SHARD_BYTES
    if free < _INODES_A_SHARD * shards:
        cause = f"a cache of shards smaller than {size(room.capacity_bytes / max(1, free // 2))} would use them up"
        return warning(name, found, cause, "mkfs.ext4 -i 65536 DEVICE   # reformat with more inodes")
    return ok(name, found, figures={"free_inodes": free})
