"""Check of the cache disk's write and read throughput, bypassing the page cache."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardcache.cache.operations.origin_probe.findings import Finding, failed, ok, skipped, warning
from shardcache.cli.doctor.blocking import in_thread
from shardcache.cli.doctor.context import Case
from shardcache.cli.doctor.mounts import nearest
from shardcache.config import Settings
from shardcache.units import size

_BLOCK_BYTES = 4 * 1024**2
_MOST_BYTES = 256 * 1024**2
_LIMIT_S = 2.0
# Slower than a single hard disk: the node is better off without a cache, or its disk is failing.
_SLOW_WRITE = 100e6
_SLOW_READ = 100e6


async def examine(case: Case) -> list[Finding]:
    """Write an unnamed file for at most two seconds, and read it back."""
    name = "disk.write"
    if case.quick:
        return [skipped(name, "not measured with --quick")]
    if case.cache_dir is None or not case.is_operators:
        return [skipped(name, "you may not write to the cache folder")]
    return await in_thread(_measure, nearest(case.cache_dir), case.settings)


def _measure(folder: Path, settings: Settings | None) -> list[Finding]:
    most_bytes = _to_spare(folder, settings)
    if not most_bytes:
        return [skipped("disk.write", "not enough free space to measure")]
    try:
        with _nameless(folder) as (fd, past_cache):
            written_bytes, written_s = _write(fd, most_bytes)
            read_bytes, read_s = _read(fd, written_bytes)
    except OSError as exn:
        cause = exn.strerror or str(exn)
        return [failed("disk.write", f"cannot write to {folder}", cause, "dmesg | tail -50")]
    how = "O_DIRECT" if past_cache else "fsync, then read after dropping the page cache"
    return [
        _judge("disk.write", written_bytes / written_s, _SLOW_WRITE, f"written with {how}"),
        _judge("disk.read", read_bytes / read_s, _SLOW_READ, f"read with {how}"),
    ]


def _to_spare(folder: Path, settings: Settings | None) -> int:
    """Return how many bytes may be written, few enough that a running daemon would not evict shards for them."""
    stat = os.statvfs(folder)
    kept_bytes = 0 if settings is None else settings.min_free.of(stat.f_blocks * stat.f_frsize)
    spare_bytes = max(0, stat.f_bavail * stat.f_frsize - kept_bytes) // 4
    return min(_MOST_BYTES, spare_bytes) // _BLOCK_BYTES * _BLOCK_BYTES


@contextlib.contextmanager
def _nameless(folder: Path) -> Iterator[tuple[int, bool]]:
    """Yield the descriptor of an unnamed file, and True if it bypasses the page cache."""
    fd = _open(folder)
    try:
        flags = os.O_RDWR | os.O_CLOEXEC
        direct = None
        with contextlib.suppress(OSError):  # no O_DIRECT on this filesystem, or no /proc
            direct = os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT)
        try:
            yield (fd, False) if direct is None else (direct, True)
        finally:
            if direct is not None:
                os.close(direct)
    finally:
        os.close(fd)


def _open(folder: Path) -> int:
    with contextlib.suppress(OSError):  # not every filesystem supports unnamed files
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix="doctor-", dir=folder)
    Path(path).unlink()
    return fd


def _write(fd: int, most_bytes: int) -> tuple[int, float]:
    """Return the number of bytes written, and the seconds until all of them were on the disk."""
    with mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned, as O_DIRECT requires
        block.write(os.urandom(_BLOCK_BYTES))  # incompressible, as some disks compress
        began_s = time.monotonic()
        done_bytes = _blocks(most_bytes, began_s, lambda offset: os.pwritev(fd, [block], offset))
        os.fsync(fd)
        return done_bytes, time.monotonic() - began_s


def _read(fd: int, most_bytes: int) -> tuple[int, float]:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        began_s = time.monotonic()
        done_bytes = _blocks(most_bytes, began_s, lambda offset: os.preadv(fd, [block], offset))
        return done_bytes, time.monotonic() - began_s


def _blocks(most_bytes: int, began_s: float, step: Callable[[int], int]) -> int:
    """Process the file block by block until the time limit; return the number of bytes processed."""
    done_bytes = 0
    while done_bytes < most_bytes and time.monotonic() - began_s < _LIMIT_S:
        done_bytes += step(done_bytes)
    return done_bytes


def _judge(name: str, bytes_per_s: float, slow_bytes_per_s: float, how: str) -> Finding:
    found = f"{size(bytes_per_s)}/s in one stream, {how}"
    figures = {"bytes_per_s": round(bytes_per_s)}
    if bytes_per_s >= slow_bytes_per_s:
        return ok(name, found, figures=figures)
    cause = "slower than one hard disk: a network volume, a throttled volume, or a disk kept busy by others"
    return warning(
        name,
        found,
        cause,
        "iostat -x 1 5   # is it busy? if not, use a local NVMe: --cache-dir",
        figures=figures,
    )
