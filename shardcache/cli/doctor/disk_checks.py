"""Checks of the cache's folder, its filesystem and its disk, for `shardcache doctor`.

`runner` calls the public functions in this order. Each returns findings, the lines of the report:
an observation (`found`), its cause or consequence, and a remedy. The operator is the user who runs
the daemon, or would run it; other users only read from the cache. `context.cache_dir` is the
cache's folder, and `context.own_cache_dir` is the same folder for the operator, but None for other
users.
"""

import os
import shlex
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage

from shardcache.cli.doctor.context import (
    Context,
    Finding,
    failed,
    measured,
    ok,
    skipped,
    start_command,
    this_user,
    warning,
)
from shardcache.cli.doctor.path_access import (
    access_fix,
    blocking_path,
    nearest_existing,
    permissions_of,
)
from shardcache.shared.units import size, user_name
from shardcache.store.disk.mounts import mount_of
from shardcache.store.folder.layout import Layout
from shardcache.store.folder.permissions import other_writers

# Placeholder, in a remedy, for a folder that the operator has to choose.
_LOCAL_FOLDER = "/path/on/local/disk"

# A measurement of the disk's speed writes blocks to a file, and then reads them, up to a number of
# bytes and a time for each of the two.
_BLOCK_BYTES = 4 * 1024**2
_MAX_BYTES = 256 * 1024**2
_LIMIT_S = 2.0
# A disk below this rate is slower than a single hard disk: the node is better off without a cache,
# or the disk is failing.
_SLOW_BYTES_PER_S = 100e6
# The measurement's file takes at most a quarter of the spare space, so that a running daemon does
# not have to evict shards.
_SPARE_DIVISOR = 4
_STAT_BLOCK_BYTES = 512  # unit of st_blocks, see stat(2)


def check_folder(context: Context) -> Finding:
    """Check that the operator can write to the cache folder, or that another user can read it."""
    cache_dir = context.cache_dir
    if cache_dir is None:
        return skipped("unknown: no daemon answers, and there are no valid options")
    if context.is_operator:
        return _check_writable(context, cache_dir)
    return _check_readable(cache_dir)


def _check_readable(cache_dir: Path) -> Finding:
    """Check that this user, who is not the operator, can read the cache folder."""
    blocking = blocking_path(cache_dir, os.R_OK | os.X_OK)
    if blocking is None:
        return ok(f"{cache_dir} exists, and {this_user()} may read it")
    if not blocking.exists():
        cause = (
            "readers open the daemon's files by path; "
            "in a container, the folder must be mounted at the same path"
        )
        return failed(
            f"{cache_dir} does not exist", cause, f"docker run -v {cache_dir}:{cache_dir}:ro …"
        )
    return failed(f"{this_user()} may not read {cache_dir}", *access_fix(blocking))


def _check_writable(context: Context, cache_dir: Path) -> Finding:
    """Check that this user, the operator, can write to the cache folder, or create it."""
    existing = nearest_existing(cache_dir)
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        mounted = mount_of(existing).folder
        cause = (
            f"the filesystem at {mounted} is mounted read-only; "
            "dmesg shows if the kernel did it after an error"
        )
        return failed(
            f"{cache_dir} is not writable",
            cause,
            f"mount -o remount,rw {shlex.quote(str(mounted))}",
        )
    if blocking_path(existing, os.R_OK | os.W_OK | os.X_OK) is not None:
        user = this_user()
        permissions = permissions_of(existing)
        command = f"install -d -o {user} -m 0750"
        if existing == cache_dir:
            command = f"chown -R {user}"
        return failed(
            f"{user} may not write to {cache_dir}",
            f"{existing} is {permissions}, and the daemon would run as {user}",
            f"{command} {shlex.quote(str(cache_dir))}   # as root",
        )
    if existing != cache_dir:
        return ok(f"{cache_dir} will be created")
    return _check_owner(context, cache_dir)


def _check_owner(context: Context, cache_dir: Path) -> Finding:
    """Check that an existing folder belongs to the daemon's user, who alone may write to it."""
    layout = Layout(cache_dir)
    # `context.uid` is the user of the running daemon. If it is None, the daemon is taken to run as
    # the user of the doctor.
    uid = os.geteuid() if context.uid is None else context.uid
    paths = (cache_dir, layout.shards, layout.partial, layout.quarantine, layout.catalogue)
    existing_paths = filter(Path.exists, paths)
    foreign_paths = [path for path in existing_paths if path.stat().st_uid != uid]
    if foreign_paths:
        path = foreign_paths[0]
        owner = user_name(path.stat().st_uid)
        cause = (
            f"{path} belongs to {owner}: a daemon that ran as {owner} created it, or it was copied"
        )
        # If root runs the doctor and no daemon runs, the daemon's future user is unknown, so the
        # finding is only a warning.
        is_user_unknown = context.uid is None and uid == 0
        make_finding = warning if is_user_unknown else failed
        return make_finding(
            f"{cache_dir} belongs to another user",
            cause,
            f"chown -R {user_name(uid)} {shlex.quote(str(cache_dir))}   # as root",
        )
    permissions = permissions_of(cache_dir)
    writers = other_writers(cache_dir, uid)
    if writers:
        cause = f"{writers} may write to it ({permissions}), so the daemon does not start with it"
        return failed(
            f"{cache_dir} is open to other users",
            cause,
            f"chmod go-w {shlex.quote(str(cache_dir))}",
        )
    return ok(f"{cache_dir} ({permissions})")


def check_filesystem(context: Context) -> Finding | None:
    """Check that the cache is on a local disk; None if this user is not the operator."""
    if context.own_cache_dir is None:
        return None
    mount = mount_of(nearest_existing(context.own_cache_dir))
    found = f"{mount.kind} at {mount.folder}"
    if mount.is_network:
        cause = (
            "every read goes over the network, which the cache should avoid, "
            "and locks may not work across nodes"
        )
        return _propose_options(context, found, cause, {"cache_dir": _LOCAL_FOLDER})
    if mount.is_memory:
        cause = "shards there use the node's memory, and are lost when the node restarts"
        return _propose_options(context, found, cause, {"cache_dir": _LOCAL_FOLDER})
    if mount.kind == "overlay":
        cause = "this is the container's own layer: slow, small, and deleted with the container"
        return warning(
            found,
            cause,
            f"docker run -v /nvme/shardcache:{context.own_cache_dir} …   # a node's folder",
        )
    return ok(found)


def check_space(context: Context) -> Finding:
    """Compare free space with the cache's capacity and --min-free."""
    cache_dir = context.own_cache_dir
    settings = context.settings
    if cache_dir is None or settings is None:
        return skipped(
            "capacity and --min-free are known to the daemon's operator, with valid options",
        )
    existing = nearest_existing(cache_dir)
    total_bytes, _, free_bytes = disk_usage(existing)
    if context.status is None:
        capacity_bytes = settings.capacity.of(total_bytes)
        used_bytes = _allocated_bytes(cache_dir)
    else:
        # The daemon may run with another capacity than the doctor's options say. It may also run
        # with another --min-free, but that is not in its status.
        capacity_bytes = context.status["cache"]["capacity_bytes"]
        used_bytes = context.status["cache"]["used_bytes"]
    min_free_bytes = settings.min_free.of(total_bytes)
    # The size to which the cache could grow with the space that is free now.
    reachable_bytes = max(0, used_bytes + free_bytes - min_free_bytes)

    free = f"{size(free_bytes)} of {size(total_bytes)} free"
    limits = f"capacity {size(capacity_bytes)}, --min-free {size(min_free_bytes)}"
    found = f"{free}; cache {size(used_bytes)}, {limits}"
    figures = {"free_bytes": free_bytes, "reachable_bytes": reachable_bytes}
    mounted = shlex.quote(str(mount_of(existing).folder))
    show_largest = f"du -xh --max-depth=2 {mounted} | sort -h | tail"
    if not reachable_bytes:
        cause = "free space is below --min-free, so nothing is fetched"
        remedy = f"{show_largest}   # remove unneeded files, or lower --min-free"
        return failed(found, cause, remedy, **figures)
    if not _has_free_inodes(existing):
        remedy = "mkfs.ext4 -i 65536 DEVICE   # reformat, or remove files"
        return failed(found, "no inode is free", remedy, **figures)
    if reachable_bytes >= capacity_bytes:
        return measured(found, figures)

    can_grow = f"the cache can grow to {size(reachable_bytes)}"
    if total_bytes - min_free_bytes < capacity_bytes:
        cause = f"the filesystem is too small for the capacity: {can_grow}"
        options = {"capacity": _rounded_down(reachable_bytes)}
        note = "   # or a larger disk"
        return _propose_options(context, found, cause, options, note, **figures)
    cause = f"other files use the rest: {can_grow}"
    return warning(found, cause, f"{show_largest}   # remove unneeded files", **figures)


def _allocated_bytes(folder: Path) -> int:
    """Return the space that a folder's files take on the disk."""
    blocks = sum(path.lstat().st_blocks for path in folder.rglob("*"))
    return blocks * _STAT_BLOCK_BYTES


def _has_free_inodes(path: Path) -> bool:
    """Return False if the filesystem of `path` cannot create another file."""
    filesystem_status = os.statvfs(path)
    has_inode_limit = filesystem_status.f_files > 0  # 0 if inodes are made as needed
    return not has_inode_limit or filesystem_status.f_favail > 0


def _rounded_down(size_bytes: int) -> str:
    """Return a size as the value of an option: in whole GB, or in whole MB below 10 GB."""
    if size_bytes >= 10**10:
        return f"{size_bytes // 10**9}GB"
    return f"{size_bytes // 10**6}MB"


def _propose_options(
    context: Context,
    found: str,
    cause: str,
    options: Mapping[str, str],
    note: str = "",
    **figures: float,
) -> Finding:
    """Return a warning whose remedy is to start a daemon with better options.

    If no daemon runs, the remedy's command also has the options that the doctor was given. A
    running daemon may have been started with other options, so these are left out then.

    Args:
        context: has the options that the doctor was given.
        found: the observation.
        cause: cause of the warning.
        options: the better options, by name.
        note: a comment to append to the command.
        figures: measurements.
    """
    if context.status is None:
        command = start_command(context, options)
    else:
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
        command = " ".join(["shardcache serve", *flags])
    return replace(warning(found, cause, f"{command}{note}", **figures), proposes=options)


def measure_speed(context: Context) -> Finding | list[Finding]:
    """Measure the rates of writing to the cache's disk and of reading from it."""
    if context.quick:
        return skipped("not measured with --quick")
    if context.own_cache_dir is None:
        return skipped("you may not write to the cache folder")
    folder = nearest_existing(context.own_cache_dir)
    total_bytes, _, free_bytes = disk_usage(folder)
    min_free_bytes = 0
    if context.settings is not None:
        min_free_bytes = context.settings.min_free.of(total_bytes)
    spare_bytes = max(0, free_bytes - min_free_bytes)
    max_bytes = min(_MAX_BYTES, spare_bytes // _SPARE_DIVISOR)
    max_blocks = max_bytes // _BLOCK_BYTES
    if not max_blocks:
        return skipped("not enough free space to measure")
    write_rate, read_rate = _measure_rates(folder, max_blocks)
    # `runner` gives the first finding the name of the check, `disk.write`.
    return [_rate_finding(write_rate), _rate_finding(read_rate).named("disk.read")]


def _measure_rates(folder: Path, max_blocks: int) -> tuple[float, float]:
    """Return the rates of writing and of reading, in bytes per second.

    A file without a name is written, flushed to the disk, and read back from the disk.

    Args:
        folder: folder of the file.
        max_blocks: maximum length of the file, in blocks.
    """
    block = os.urandom(_BLOCK_BYTES)  # random bytes, since some disks compress
    with tempfile.TemporaryFile(dir=folder, prefix="doctor-", buffering=0) as file:
        fd = file.fileno()

        written_bytes = 0
        start_s = time.monotonic()
        while written_bytes < max_blocks * _BLOCK_BYTES and time.monotonic() - start_s < _LIMIT_S:
            written_bytes += os.pwrite(fd, block, written_bytes)
        os.fsync(fd)
        write_rate = written_bytes / (time.monotonic() - start_s)

        # The file is dropped from the page cache, so that its bytes are read from the disk. The
        # offset 0 and the length 0 stand for the whole file.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        read_bytes = 0
        start_s = time.monotonic()
        while read_bytes < written_bytes and time.monotonic() - start_s < _LIMIT_S:
            read_bytes += len(os.pread(fd, _BLOCK_BYTES, read_bytes))
        read_rate = read_bytes / (time.monotonic() - start_s)
    return write_rate, read_rate


def _rate_finding(bytes_per_s: float) -> Finding:
    """Return the finding for a rate of writing or reading."""
    found = f"{size(bytes_per_s)}/s in one stream"
    if bytes_per_s >= _SLOW_BYTES_PER_S:
        return ok(found, bytes_per_s=round(bytes_per_s))
    cause = (
        "slower than one hard disk: a network volume, a throttled volume, "
        "or a disk kept busy by others"
    )
    remedy = "iostat -x 1 5   # is it busy? if not, use a local NVMe: --cache-dir"
    return warning(found, cause, remedy, bytes_per_s=round(bytes_per_s))
