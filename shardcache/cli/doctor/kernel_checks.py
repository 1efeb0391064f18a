"""Checks of the kernel's limits on open files and shared memory, for `shardcache doctor`."""

import re
from pathlib import Path
from shutil import disk_usage

from shardcache.cli.doctor.context import Context, Finding, failed, ok, skipped, warning
from shardcache.config.settings import Settings
from shardcache.server.listening.limits import own_files
from shardcache.shared.units import size

# Number of readers on a large node: 8 accelerators with 16 workers each, training and validation.
_READERS = 256
_OPEN_FILES = re.compile(r"^Max open files\s+(\d+)\s+(\d+)", re.MULTILINE)
_SHM = Path("/dev/shm")
_MIN_SHM_BYTES = 1024**3
_MIN_FREE_DIVISOR = 10  # at least a tenth of /dev/shm should be free


def check_open_files(context: Context) -> Finding:
    """Check the limit on open files of the daemon, or of a daemon that would be started here."""
    if context.status is not None and context.pid is None:
        return skipped("the daemon's process is not visible from here")
    if context.pid is None:
        # A daemon that starts raises the soft limit of this environment to the hard limit.
        _, limit = _open_file_limits("self")
        remedy = "ulimit -n 65536   # before serve; permanently: LimitNOFILE=65536 in the unit"
    else:
        limit, _ = _open_file_limits(str(context.pid))
        remedy = (
            f"prlimit --pid {context.pid} --nofile=65536:65536   # now; "
            "permanently: LimitNOFILE=65536 in the unit"
        )
    settings = context.settings or Settings.model_construct()  # the defaults
    needed = own_files(settings)
    found = f"limit {limit:,}; the daemon needs up to {needed:,}, plus one per reader"
    if limit <= needed:
        return failed(
            found,
            "too few for its connections and transfers, let alone a reader",
            remedy,
            limit=limit,
        )
    if limit < needed + _READERS:
        return warning(found, f"only {limit - needed:,} readers can connect", remedy, limit=limit)
    return ok(found, limit=limit)


def _open_file_limits(process: str) -> tuple[int, int]:
    """Return the soft and the hard limit on open files of a process.

    Args:
        process: a process id, or "self".
    """
    limits = Path(f"/proc/{process}/limits").read_text()
    [(soft, hard)] = _OPEN_FILES.findall(limits)
    return int(soft), int(hard)


def check_shared_memory(_context: Context) -> Finding:
    """Check the size and free space of /dev/shm."""
    cause = "DataLoader workers pass tensors through it, and die with 'Bus error' when it is full"
    if not _SHM.is_dir():
        return warning(f"there is no {_SHM}", cause, f"mount -t tmpfs -o size=50% tmpfs {_SHM}")
    total_bytes, _, free_bytes = disk_usage(_SHM)
    found = f"{size(free_bytes)} of {size(total_bytes)} free in {_SHM}"
    if total_bytes < _MIN_SHM_BYTES:
        remedy = (
            f"mount -o remount,size=8g {_SHM}   # docker run --shm-size=8g; "
            "in a pod, emptyDir with medium: Memory"
        )
        return warning(found, cause, remedy, free_bytes=free_bytes)
    if free_bytes < total_bytes // _MIN_FREE_DIVISOR:
        remedy = f"ls -lS {_SHM}   # remove files of dead jobs; shardcache stores nothing there"
        return warning(found, cause, remedy, free_bytes=free_bytes)
    return ok(found, free_bytes=free_bytes)
