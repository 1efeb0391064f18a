"""Checks of the kernel's limits on a daemon and its readers: open files, mappings, shared memory, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shardcache.cache.operations.origin_probe.findings import Finding, failed, ok, skipped, warning
from shardcache.cli.doctor.blocking import in_thread
from shardcache.cli.doctor.context import Case
from shardcache.config import Settings
from shardcache.units import size

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")

# The daemon's files besides sessions and transfers: the catalogue's in each thread, indexers, logs, the event loop.
_OWN_FILES = 160
_FILES_A_TRANSFER = 6
# 8 accelerators, 16 workers each, training and validation.
_READERS = 256
_LEAST_MAPPINGS = 16_384
_LEAST_SHM_BYTES = 1024**3
# An idle daemon uses 110 MiB, its indexers included; the rest is for the plans of large datasets. On top come the parts
# in flight, and as much again being written to disk.
_OWN_BYTES = 256 * 1024**2
_BUFFERS_A_CONNECTION = 2


async def examine(case: Case) -> list[Finding]:
    """Check the limits: those of the running daemon, if its process is visible."""
    return await in_thread(_examine, case)


def _examine(case: Case) -> list[Finding]:
    if case.running is not None and case.running.pid is None:
        hidden = "the daemon's process is not visible from here"
        return [skipped("kernel.open_files", hidden), _mappings(), _shared_memory(), skipped("kernel.memory", hidden)]
    return [_open_files(case), _mappings(), _shared_memory(), _memory(case)]


def _process(case: Case) -> Path:
    pid = None if case.running is None else case.running.pid
    return _PROC / ("self" if pid is None else str(pid))


def _open_files(case: Case) -> Finding:
    name, settings = "kernel.open_files", case.settings or Settings.model_construct()
    limit = _limit(_process(case) / "limits", "Max open files")
    base = _OWN_FILES + 2 * settings.max_connections + _FILES_A_TRANSFER * settings.max_transfers
    readers = limit - base
    pid = None if case.running is None else case.running.pid
    mend = f"prlimit --pid {pid} --nofile=65536:65536   # now;" if pid else "ulimit -n 65536   # before serve;"
    remedy = f"{mend} permanently: LimitNOFILE=65536 in the unit"
    found = f"limit {limit:,}; the daemon needs up to {base:,}, plus one per reader"
    if readers <= 0:
        cause = "too few for its connections and transfers, let alone a reader"
        return failed(name, found, cause, remedy, figures={"limit": limit})
    if readers < _READERS:
        return warning(name, found, f"only {readers:,} readers can connect", remedy, figures={"limit": limit})
    return ok(name, found, figures={"limit": limit})


def _limit(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(name))
    return int(line.removeprefix(name).split()[0])  # the soft limit applies; for open files it is always a number


def _mappings() -> Finding:
    name, most = "kernel.mappings", int((_PROC / "sys/vm/max_map_count").read_text())
    found = f"{most:,} per process"
    if most < _LEAST_MAPPINGS:
        cause = "readers map each leased shard, and CUDA and allocators add thousands of mappings"
        return warning(name, found, cause, "sysctl -w vm.max_map_count=65530", figures={"limit": most})
    return ok(name, found, figures={"limit": most})


def _shared_memory() -> Finding:
    name = "kernel.shared_memory"
    if not _SHM.is_dir():
        cause = "DataLoader workers pass tensors through it"
        return warning(name, f"there is no {_SHM}", cause, f"mount -t tmpfs -o size=50% tmpfs {_SHM}")
    stat = os.statvfs(_SHM)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{size(free)} of {size(total)} free in {_SHM}"
    if total < _LEAST_SHM_BYTES:
        cause = "DataLoader workers pass tensors through it, and die with 'Bus error' when it is full"
        remedy = f"mount -o remount,size=8g {_SHM}   # docker run --shm-size=8g; in a pod, emptyDir with medium: Memory"
        return warning(name, found, cause, remedy, figures={"free_bytes": free})
    if free < total // 10:
        cause = "DataLoader workers pass tensors through it, and it is nearly full; shardcache stores nothing there"
        return warning(name, found, cause, f"ls -lS {_SHM}   # remove files of dead jobs", figures={"free_bytes": free})
    return ok(name, found, figures={"free_bytes": free})


def _memory(case: Case) -> Finding:
    name, settings = "kernel.memory", case.settings or Settings.model_construct()
    limits = list(_cgroup_limits(_process(case)))
    if not limits:
        return ok(name, "not limited by a control group")
    limit_bytes = min(limits)
    needed_bytes = _OWN_BYTES + _BUFFERS_A_CONNECTION * settings.max_connections * settings.part_size
    found = f"control group limit {size(limit_bytes)}; the daemon needs up to {size(needed_bytes)} besides page cache"
    if limit_bytes >= needed_bytes:
        return ok(name, found, figures={"limit_bytes": limit_bytes})
    cause = f"{settings.max_connections} connections with parts of {size(settings.part_size)} may get it OOM-killed"
    remedy = f"systemctl set-property shardcache MemoryMax={needed_bytes * 5 // 4}   # or fewer --max-connections"
    return warning(name, found, cause, remedy, figures={"limit_bytes": limit_bytes})


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
            if folder.is_relative_to(top):
                yield from _number(folder / file)


def _number(path: Path) -> Iterator[int]:
    try:
        text = path.read_text().strip()
    except OSError:  # the other cgroup version, or a namespace that shows only its own subtree
        return
    # Version 1 represents "no limit" as the largest multiple of the page size.
    if text != "max" and int(text) < 2**62:
        yield int(text)
