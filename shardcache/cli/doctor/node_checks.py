"""Checks of the node: daemon, options, the cache's folder and disk, and the kernel's limits."""

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from types import MappingProxyType

from shardcache.cli.common import count
from shardcache.cli.doctor.context import (
    Context,
    Finding,
    connect,
    failed,
    me,
    of_error,
    ok,
    skipped,
    warning,
)
from shardcache.config.settings import Settings
from shardcache.errors import DaemonError
from shardcache.server.listening.limits import own_files
from shardcache.shared.private import tool_socket
from shardcache.shared.socket_paths import SOCKET_ENV
from shardcache.shared.units import duration, group_name, size, user_name
from shardcache.shared.unix_socket import MAX_SOCKET_BYTES
from shardcache.store.disk.mounts import mount_of
from shardcache.store.folder.layout import Layout
from shardcache.store.folder.permissions import other_writers

# A disk operation that takes longer hangs.
_SILENT_S = 10.0

# Stands for a folder that the operator has to choose.
_LOCAL = "/path/on/local/disk"

# The disk's speed is measured in blocks, up to a number of bytes and a time in each direction.
_BLOCK_BYTES = 4 * 1024**2
_MAX_BYTES = 256 * 1024**2
_LIMIT_S = 2.0
# Slower than a single hard disk: the node is better off without a cache, or its disk is failing.
_SLOW_BYTES_PER_S = 100e6

# Readers of a large node: 8 accelerators, 16 workers each, training and validation.
_READERS = 256
_SHM = Path("/dev/shm")
_MIN_SHM_BYTES = 1024**3


# Socket, daemon and options


def socket_place(context: Context) -> Finding:
    """Check the socket's path, and that clients look for the socket there."""
    socket = context.socket
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_BYTES:
        cause = f"the path has {length} bytes; the kernel's limit is {MAX_SOCKET_BYTES}"
        return failed(
            f"{socket} is too long for a socket",
            cause,
            "shardcache serve --socket /run/user/$UID/s.sock",
        )
    if "socket" in context.flags:
        return ok(f"{socket} (--socket)")
    clients_socket = None
    with suppress(DaemonError):
        clients_socket = tool_socket()
    if clients_socket != socket:
        cause = "only the config file names it, which training processes do not read"
        remedy = f"export {SOCKET_ENV}={shlex.quote(str(socket))}   # where training runs"
        return warning(f"{socket}, but clients look at {clients_socket}", cause, remedy)
    named_by = "where clients look by default"
    if os.environ.get(SOCKET_ENV):
        named_by = f"${SOCKET_ENV}"
    return ok(f"{socket} ({named_by})")


def listener(context: Context) -> Finding:
    """Connect to the socket as clients do."""
    socket = context.socket
    start = start_command(context)
    try:
        connect(socket)
    except PermissionError:
        closed = _barrier(socket, os.W_OK)
        cause = "the kernel denies access"
        remedy = f"ls -l {shlex.quote(str(socket))}"
        if closed:
            cause, remedy = _way_in(closed)
        return failed(f"you may not use {socket}", cause, remedy)
    except FileNotFoundError:
        cause = "none was started; or, in a container, the socket's folder is not mounted"
        return warning(f"no daemon: there is no socket at {socket}", cause, start)
    except ConnectionRefusedError:
        if not socket.is_socket():
            return failed(
                f"{socket} is not a socket",
                "another file is there",
                f"rm {shlex.quote(str(socket))}",
            )
        cause = "it was left behind by a daemon that was killed; the next one replaces it"
        return warning(f"no daemon listens at {socket}", cause, start)
    except OSError as exn:
        return failed(f"cannot connect to {socket}", exn.strerror or str(exn), start)
    if context.status is None:
        cause = "" if context.daemon_error is None else context.daemon_error.message
        log = "journalctl -u shardcache -n 100   # or its own log"
        remedy = f"{log}; then: systemctl restart shardcache"
        return failed(f"the server at {socket} returns no status", cause, remedy)
    user = "an unknown user" if context.uid is None else user_name(context.uid)
    version = context.status["version"]
    pid = context.status["pid"]
    return ok(f"shardcache {version}, pid {pid}, run by {user}; {_who_may(socket)}")


def start_command(context: Context, proposed: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the command that starts a daemon with the options that the doctor was given.

    Args:
        proposed: better values of options, by name.
    """
    words = ["shardcache", "serve"]
    for flag, value in {**context.flags, **proposed}.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += ["--" + flag.replace("_", "-"), str(each)]
    return shlex.join(words)


def health(context: Context) -> Finding | None:
    """Read the state of the daemon and of its disk from the status page."""
    if context.status is None:
        return None
    disk = context.status.get("disk") or {}
    if disk.get("silent_s", 0) > _SILENT_S:
        found = f"the cache disk has not responded for {duration(disk['silent_s'])}"
        cause = "a device or a network filesystem hangs; all disk operations are blocked"
        return failed(found, cause, "dmesg | tail -50")
    if error := disk.get("error"):
        return failed(
            error["message"],
            "cached shards are served, but nothing new is fetched",
            error["remedy"],
        )
    if context.status.get("draining"):
        cause = "it is shutting down, and finishes running requests"
        return failed(
            "the daemon is stopping",
            cause,
            "systemctl start shardcache   # once it has stopped",
        )
    return ok("it is serving, and its disk is healthy")


def refused(context: Context) -> Finding | None:
    """Name a shard that the daemon refused when it last arrived, and count all of them."""
    errors = None if context.status is None else context.status.get("refused")
    if not errors:
        return None
    last = errors[-1]
    found = f"{count(len(errors), 'shard')} refused on arrival, last {last['url']}"
    return warning(found, f"{last['code']}: {last['message']}", last["remedy"], shards=len(errors))


def options(context: Context) -> Finding:
    """Check that the options are valid."""
    config = context.config
    error = context.config_error
    closed = _barrier(config, os.R_OK)
    if closed is not None and os.path.lexists(closed):  # it, or a folder above it, denies access
        return skipped(f"you may not read {config}; its contents are not checked")
    if error is not None:
        return of_error(error, "the daemon does not start with it")
    if closed:
        return ok(f"no file at {config}: options come from flags and environment")
    return ok(f"{config} is valid")


# The cache's folder, space and disk


def folder(context: Context) -> Finding:
    """Check that the daemon can write to the folder or create it, or that a reader can read it."""
    place = context.cache_dir
    if place is None:
        return skipped("unknown: no daemon answers, and there are no valid options")
    return _writable(context, place) if context.is_operator else _readable(place)


def _readable(place: Path) -> Finding:
    closed = _barrier(place, os.R_OK | os.X_OK)
    if closed is None:
        return ok(f"{place} exists, and {me()} may read it")
    if not closed.exists():
        cause = (
            "readers open the daemon's files by path; "
            "in a container, the folder must be mounted at the same path"
        )
        return failed(f"{place} does not exist", cause, f"docker run -v {place}:{place}:ro …")
    return failed(f"{me()} may not read {place}", *_way_in(closed))


def _writable(context: Context, place: Path) -> Finding:
    existing = _nearest(place)
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        mounted = mount_of(existing).folder
        cause = (
            f"the filesystem at {mounted} is mounted read-only; "
            "dmesg shows if the kernel did it after an error"
        )
        return failed(
            f"{place} is not writable",
            cause,
            f"mount -o remount,rw {shlex.quote(str(mounted))}",
        )
    if _barrier(existing, os.R_OK | os.W_OK | os.X_OK) is not None:
        cause = f"{existing} is {_who_may(existing)}, and the daemon would run as {me()}"
        command = f"chown -R {me()}" if existing == place else f"install -d -o {me()} -m 0750"
        return failed(
            f"{me()} may not write to {place}",
            cause,
            f"{command} {shlex.quote(str(place))}   # as root",
        )
    return _owned(context, place) if existing == place else ok(f"{place} will be created")


def _owned(context: Context, place: Path) -> Finding:
    layout = Layout(place)
    uid = os.geteuid() if context.uid is None else context.uid
    parts = (place, layout.shards, layout.partial, layout.quarantine, layout.catalogue)
    stray = next((part for part in parts if part.exists() and part.stat().st_uid != uid), None)
    if stray is not None:
        owner = user_name(stray.stat().st_uid)
        cause = (
            f"{stray} belongs to {owner}: a daemon that ran as {owner} created it, or it was copied"
        )
        # As root, the doctor does not know which user the daemon is going to run as.
        report = warning if context.uid is None and uid == 0 else failed
        return report(
            f"{place} belongs to another user",
            cause,
            f"chown -R {user_name(uid)} {place}   # as root",
        )
    who = other_writers(place, uid)
    if who:
        cause = f"{who} may write to it ({_who_may(place)}), so the daemon does not start with it"
        return failed(
            f"{place} is open to other users",
            cause,
            f"chmod go-w {shlex.quote(str(place))}",
        )
    return ok(f"{place} ({_who_may(place)})")


def filesystem(context: Context) -> Finding | None:
    """Check that the filesystem is a local disk's."""
    if context.own_cache_dir is None:
        return None
    mount = mount_of(_nearest(context.own_cache_dir))
    found = f"{mount.kind} at {mount.folder}"
    if mount.is_network:
        cause = (
            "every read goes over the network, which the cache should avoid, "
            "and locks may not work across nodes"
        )
        return _better(context, found, cause, {"cache_dir": _LOCAL})
    if mount.is_memory:
        cause = "shards there use the node's memory, and are lost when the node restarts"
        return _better(context, found, cause, {"cache_dir": _LOCAL})
    if mount.kind == "overlay":
        cause = "this is the container's own layer: slow, small, and deleted with the container"
        return warning(
            found,
            cause,
            f"docker run -v /nvme/shardcache:{context.own_cache_dir} …   # a node's folder",
        )
    return ok(found)


def space(context: Context) -> Finding:
    """Compare free space with the cache's capacity and --min-free."""
    place = context.own_cache_dir
    settings = context.settings
    if place is None or settings is None:
        return skipped(
            "capacity and --min-free are known to the daemon's operator, with valid options",
        )
    stat = os.statvfs(_nearest(place))
    total_bytes, _, free_bytes = disk_usage(_nearest(place))
    capacity_bytes = settings.capacity.of(total_bytes)
    min_free_bytes = settings.min_free.of(total_bytes)
    if context.status is None:
        used_bytes = sum(path.lstat().st_blocks * 512 for path in place.rglob("*"))
    else:
        capacity_bytes = context.status["cache"]["capacity_bytes"]
        used_bytes = context.status["cache"]["used_bytes"]
    reachable_bytes = max(0, used_bytes + free_bytes - min_free_bytes)
    limits = f"capacity {size(capacity_bytes)}, --min-free {size(min_free_bytes)}"
    free = f"{size(free_bytes)} of {size(total_bytes)} free"
    found = f"{free}; cache {size(used_bytes)}, {limits}"
    figures = {"free_bytes": free_bytes, "reachable_bytes": reachable_bytes}
    mounted = shlex.quote(str(mount_of(_nearest(place)).folder))
    largest = f"du -xh --max-depth=2 {mounted} | sort -h | tail"
    if not reachable_bytes:
        cause = "free space is below --min-free, so nothing is fetched"
        return failed(
            found, cause, f"{largest}   # remove unneeded files, or lower --min-free", **figures
        )
    if stat.f_files and not stat.f_favail:
        return failed(
            found,
            "no inode is free",
            "mkfs.ext4 -i 65536 DEVICE   # reformat, or remove files",
            **figures,
        )
    if reachable_bytes >= capacity_bytes:
        return ok(found, "", "", **figures)
    if total_bytes - min_free_bytes < capacity_bytes:
        can_grow = f"the cache can grow to {size(reachable_bytes)}"
        cause = f"the filesystem is too small for the capacity: {can_grow}"
        proposed = f"{reachable_bytes // 10**6}MB"
        if reachable_bytes >= 10**10:
            proposed = f"{reachable_bytes // 10**9}GB"
        options = {"capacity": proposed}
        return _better(context, found, cause, options, "   # or a larger disk", **figures)
    cause = f"other files use the rest: the cache can grow to {size(reachable_bytes)}"
    return warning(found, cause, f"{largest}   # remove unneeded files", **figures)


def _better(
    context: Context,
    found: str,
    cause: str,
    options: Mapping[str, str],
    note: str = "",
    **figures: float,
) -> Finding:
    """Return a warning whose remedy starts a daemon with other options.

    The remedy has the doctor's further options as well, unless a daemon runs: that one may have
    been started with others.

    Args:
        options: the proposed ones, by name.
        note: a comment behind the command.
    """
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    command = f"shardcache serve {flags}"
    if context.status is None:
        command = start_command(context, options)
    return replace(warning(found, cause, f"{command}{note}", **figures), proposes=options)


def speed(context: Context) -> Finding | list[Finding]:
    """Write an unnamed file for at most two seconds, flush it, and read it back from the disk."""
    if context.quick:
        return skipped("not measured with --quick")
    if context.own_cache_dir is None:
        return skipped("you may not write to the cache folder")
    place = _nearest(context.own_cache_dir)
    total_bytes, _, free_bytes = disk_usage(place)
    kept_bytes = 0 if context.settings is None else context.settings.min_free.of(total_bytes)
    # Few enough that a running daemon would not evict shards for them.
    spare_bytes = max(0, free_bytes - kept_bytes) // 4
    max_bytes = min(_MAX_BYTES, spare_bytes) // _BLOCK_BYTES * _BLOCK_BYTES
    if not max_bytes:
        return skipped("not enough free space to measure")
    block = os.urandom(_BLOCK_BYTES)  # incompressible, as some disks compress
    with tempfile.TemporaryFile(dir=place, prefix="doctor-", buffering=0) as file:
        fd = file.fileno()
        written_bytes, write = _timed(
            lambda offset: os.pwrite(fd, block, offset), max_bytes, lambda: os.fsync(fd)
        )
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        _, read = _timed(
            lambda offset: len(os.pread(fd, _BLOCK_BYTES, offset)), written_bytes, lambda: None
        )
    return [write, read.named("disk.read")]


def _timed(
    move: Callable[[int], int], max_bytes: int, end: Callable[[], None]
) -> tuple[int, Finding]:
    """Write or read block by block until the time limit.

    Return the bytes moved, and the finding of their rate.

    Args:
        move: writes or reads the block at an offset; returns its number of bytes.
        max_bytes: ends the measurement.
        end: is called after the last block, and counts for the time.
    """
    done_bytes = 0
    began_s = time.monotonic()
    while done_bytes < max_bytes and time.monotonic() - began_s < _LIMIT_S:
        done_bytes += move(done_bytes)
    end()
    rate = done_bytes / (time.monotonic() - began_s)
    if rate >= _SLOW_BYTES_PER_S:
        return done_bytes, ok(f"{size(rate)}/s in one stream", bytes_per_s=round(rate))
    cause = (
        "slower than one hard disk: a network volume, a throttled volume, "
        "or a disk kept busy by others"
    )
    remedy = "iostat -x 1 5   # is it busy? if not, use a local NVMe: --cache-dir"
    return done_bytes, warning(
        f"{size(rate)}/s in one stream", cause, remedy, bytes_per_s=round(rate)
    )


# The kernel's limits


def open_files(context: Context) -> Finding:
    """Check the limit on open files of the daemon, or of one started here."""
    if context.status is not None and context.pid is None:
        return skipped("the daemon's process is not visible from here")
    lines = Path(f"/proc/{context.pid or 'self'}/limits").read_text().splitlines()
    line = next(line for line in lines if line.startswith("Max open files"))
    soft, hard = map(int, line.split()[3:5])  # for open files, always numbers
    limit = hard if context.pid is None else soft  # at its start, a daemon raises one to the other
    needed = own_files(context.settings or Settings.model_construct())
    remedy = "ulimit -n 65536   # before serve; permanently: LimitNOFILE=65536 in the unit"
    if context.pid is not None:
        remedy = (
            f"prlimit --pid {context.pid} --nofile=65536:65536   # now; "
            "permanently: LimitNOFILE=65536 in the unit"
        )
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


def shared_memory(_context: Context) -> Finding:
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
    if free_bytes < total_bytes // 10:
        remedy = f"ls -lS {_SHM}   # remove files of dead jobs; shardcache stores nothing there"
        return warning(found, cause, remedy, free_bytes=free_bytes)
    return ok(found, free_bytes=free_bytes)


# Who may access a path


def _who_may(path: Path) -> str:
    """Return a path's owner, group and mode, such as `owner:group 0750`."""
    found = path.stat()
    return f"{user_name(found.st_uid)}:{group_name(found.st_gid)} {found.st_mode & 0o7777:04o}"


def _barrier(path: Path, mode: int) -> Path | None:
    """Return what this user may not access: a folder above the path, or the path; None if neither.

    Args:
        path: of a file or folder.
        mode: the access to it that is needed, as for `os.access`.
    """
    closed = (folder for folder in reversed(path.parents) if not os.access(folder, os.X_OK))
    return next(closed, None if os.access(path, mode) else path)


def _way_in(path: Path) -> tuple[str, str]:
    """Return why this user may not access a path, and the command that gives access to it."""
    found = path.stat()
    # Joining root's group is not a fix.
    if found.st_gid == 0 or not found.st_mode & 0o070:
        cause = f"only its owner may access {path} ({_who_may(path)})"
        return cause, "shardcache serve --group NAME   # the group of the training users"
    cause = f"{path} is {_who_may(path)}, and {me()} is neither its owner nor in its group"
    return cause, f"usermod -aG {group_name(found.st_gid)} {me()}   # as root; then log in again"


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
