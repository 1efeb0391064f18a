"""Checks of the kernel's limits on a daemon and its readers: open files, mappings, shared memory, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardcache.cli.doctor.context import Context
from shardcache.cli.doctor.findings import Finding, failed, ok, skipped, warning
from shardcache.config import Settings
from shardcache.server.http.connection_limit import own_files
from shardcache.units import size

_CGROUPS = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_HIDDEN = "the daemon's process is not visible from here"

# 8 accelerators, 16 workers each, training and validation.
_READERS = 256
_LEAST_MAPPINGS = 16_384
_LEAST_SHM_BYTES = 1024**3
# An idle daemon uses 110 MiB, its indexers included; the rest is for the plans of large datasets. On top come the parts
# in flight, and as much again being written to disk.
_OWN_BYTES = 256 * 1024**2
_BUFFERS_PER_CONNECTION = 2


def open_files(context: Context) -> Finding:
    """Check the limit on open files of the daemon, or of one started here."""
    if (process := _process(context)) is None:
        return skipped(_HIDDEN)
    settings = context.settings or Settings.model_construct()
    line = next(line for line in (process / "limits").read_text().splitlines() if line.startswith("Max open files"))
    soft, hard = map(int, line.split()[3:5])  # for open files, always numbers
    limit = hard if context.pid is None else soft  # at its start, a daemon raises one to the other
    base = own_files(settings)
    readers = limit - base
    remedy = "ulimit -n 65536   # before serve; permanently: LimitNOFILE=65536 in the unit"
    if context.pid is not None:
        remedy = f"prlimit --pid {context.pid} --nofile=65536:65536   # now; permanently: LimitNOFILE=65536 in the unit"
    found = f"limit {limit:,}; the daemon needs up to {base:,}, plus one per reader"
    figures = {"limit": limit}
    if readers <= 0:
        return failed(found, "too few for its connections and transfers, let alone a reader", remedy, figures=figures)
    if readers < _READERS:
        return warning(found, f"only {readers:,} readers can connect", remedy, figures=figures)
    return ok(found, figures=figures)


def _process(context: Context) -> Path | None:
    """Return the /proc folder of the daemon, without one that of this process; None if the daemon's is not visible."""
    if context.status is None:
        return Path("/proc/self")
    return None if context.pid is None else Path(f"/proc/{context.pid}")


def mappings(_context: Context) -> Finding:
    """Check the kernel's limit on mappings per process."""
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    found, figures = f"{most:,} per process", {"limit": most}
    if most < _LEAST_MAPPINGS:
        cause = "readers map each leased shard, and CUDA and allocators add thousands of mappings"
        return warning(found, cause, "sysctl -w vm.max_map_count=65530", figures=figures)
    return ok(found, figures=figures)


def shared_memory(_context: Context) -> Finding:
    """Check the size and free space of /dev/shm."""
    cause = "DataLoader workers pass tensors through it"
    if not _SHM.is_dir():
        return warning(f"there is no {_SHM}", cause, f"mount -t tmpfs -o size=50% tmpfs {_SHM}")
    stat = os.statvfs(_SHM)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found, figures = f"{size(free)} of {size(total)} free in {_SHM}", {"free_bytes": free}
    if total < _LEAST_SHM_BYTES:
        remedy = f"mount -o remount,size=8g {_SHM}   # docker run --shm-size=8g; in a pod, emptyDir with medium: Memory"
        return warning(found, f"{cause}, and die with 'Bus error' when it is full", remedy, figures=figures)
    if free < total // 10:
        cause = f"{cause}, and it is nearly full; shardcache stores nothing there"
        return warning(found, cause, f"ls -lS {_SHM}   # remove files of dead jobs", figures=figures)
    return ok(found, figures=figures)


def memory(context: Context) -> Finding:
    """Check the memory limit of the daemon's control group."""
    if (process := _process(context)) is None:
        return skipped(_HIDDEN)
    limits = list(_cgroup_limits(process))
    if not limits:
        return ok("not limited by a control group")
    settings, limit_bytes = context.settings or Settings.model_construct(), min(limits)
    needed_bytes = _OWN_BYTES + _BUFFERS_PER_CONNECTION * settings.max_connections * settings.part_size
    found = f"control group limit {size(limit_bytes)}; the daemon needs up to {size(needed_bytes)} besides page cache"
    figures = {"limit_bytes": limit_bytes}
    if limit_bytes >= needed_bytes:
        return ok(found, figures=figures)
    cause = f"{settings.max_connections} connections with parts of {size(settings.part_size)} may get it OOM-killed"
    remedy = f"systemctl set-property shardcache MemoryMax={needed_bytes * 5 // 4}   # or fewer --max-connections"
    return warning(found, cause, remedy, figures=figures)


def _cgroup_limits(process: Path) -> Iterator[int]:
    """Yield the memory limits of a process's control group and its parents, for both versions of cgroups(7)."""
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = _CGROUPS / controllers
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            # The file is missing for the other cgroup version, and in a namespace that shows only its own subtree.
            with suppress(OSError):
                text = (folder / file).read_text().strip()
                # Version 1 represents "no limit" as the largest multiple of the page size.
                if folder.is_relative_to(top) and text != "max" and int(text) < 2**62:
                    yield int(text)
