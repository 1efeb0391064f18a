"""`shardcache serve --private`: this user's own daemon, in the background.

A private daemon serves one user on a node that has no daemon of its own. Each one belongs to an
environment: the user, and the credentials in the environment's variables. A place is the set of a
daemon's files in a folder: its socket, log and lock. Each private daemon has two places: one where
the processes of its environment look first, and one in its cache folder, where processes of another
job or container find it, too.

The command `serve` calls `start`; clients run the command when they find no daemon. `start` forks
this process. The child becomes the daemon, and sends the outcome of its start through a pipe to the
parent, which waits for it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardcache.cli.starting.private_cache import (
    BASE_LOCK,
    as_cache_dir_errors,
    cache_base,
    find_running,
    free_folder,
    remove_old_caches,
)
from shardcache.shared.exceptions import DaemonError, NoDaemonError, ShardcacheError, from_json
from shardcache.shared.private import PrivatePlace, environment_digest, is_listening, locked
from shardcache.shared.protocol import Json
from shardcache.store.disk.mounts import free_bytes

if TYPE_CHECKING:
    from shardcache.config.settings import Settings
    from shardcache.store.store import Store

_IDLE_EXIT_S = 600.0  # a private daemon without readers ends after this time
_MAX_LOG_BYTES = 1024 * 1024
_STDIN = 0
_STDOUT = 1
_STDERR = 2
# Variables that a service manager sets for a process that it starts. A private daemon inherits them
# from an ancestor, for which they were meant.
_MANAGER_VARIABLES = (
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)
# Limits that a job sets for its own processes, not for a private daemon. The limit on core files is
# not among them and stays, since a core file would contain credentials.
_JOB_LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
)


def start(flags: Mapping[str, Any], config: Path | None) -> Json:
    """Start the private daemon of this environment, unless it runs already.

    Returns a JSON object: the daemon's `socket`, and `started`, True if this call started the
    daemon. If so, also its `cache_dir`, `capacity_bytes` and `pid`.

    Raises the errors of `shardcache serve`; CacheDirError if there is no local disk for the cache;
    DaemonError if the daemon ends before it serves; NoDaemonError if it was killed.

    Args:
        flags: the options of `serve` on the command line.
        config: path of the config file; None for the default one.
    """
    _raise_limits()
    place = PrivatePlace.find()
    env = dict(os.environ)
    if "cache_dir" in flags:
        env["SHARDCACHE_CACHE_DIR"] = flags["cache_dir"]
    base = cache_base(env)
    with as_cache_dir_errors():
        # Daemons do not share credentials, so a cache folder is named after a keyed hash of the
        # environment's credentials. The key is a file in the folder `base`.
        credentials_digest = environment_digest(base)
    # With both locks, only one process of this user looks for a daemon, and starts one, at a time.
    # The daemon inherits the locks, and releases them once it serves.
    with ExitStack() as stack:
        lock = stack.enter_context(locked(place.lock, is_inherited=True))
        base_lock = stack.enter_context(locked(base / BASE_LOCK, is_inherited=True))
        if _reach_running_daemon(place, base, credentials_digest):
            return {"socket": str(place.socket), "started": False}

        with as_cache_dir_errors():
            folder = free_folder(base, credentials_digest)
        if place.socket.is_symlink():  # the link leads to a daemon that has ended
            place.socket.unlink()
        place.record_cache(folder)
        settings = _settings(flags, config, place, folder)
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:  # this process becomes the daemon
            os.close(read_fd)
            second_place = PrivatePlace.in_cache(folder, base)
            _serve(settings, place, second_place, write_fd, (lock, base_lock))
        os.close(write_fd)
        return _wait_for_outcome(read_fd, place, pid)


def _raise_limits() -> None:
    """Raise the job's soft limits, which are not meant for the daemon, to the hard limits.

    This must be done before anything is written, since one of the limits is on the size of files.
    """
    for limit in _JOB_LIMITS:
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))


def _reach_running_daemon(place: PrivatePlace, base: Path, credentials_digest: str) -> bool:
    """Make a daemon of this environment reachable at `place`; return False if none runs.

    Raises NoDaemonError if this process cannot see the daemon's cache, CacheDirError if the base
    cannot be used.

    Args:
        place: the place where processes of this environment look first.
        base: the folder of all private caches.
        credentials_digest: hash of this environment's credentials.
    """
    if is_listening(place.socket):
        if not place.shows_cache():
            # The daemon's cache is in another mount namespace, or the file that names the cache is
            # being written. In the second case, another attempt succeeds.
            raise NoDaemonError(
                "a private daemon has just been started, but this process cannot see its cache",
                remedy="try again",
            )
        return True
    with as_cache_dir_errors():
        other = find_running(base, credentials_digest)
        if other is None:
            return False
        # The daemon can be reached in its cache folder only, so `place` gets a link to its socket.
        place.link_to(other)
        place.record_cache(other.folder)
    return True


def _settings(
    flags: Mapping[str, Any],
    config: Path | None,
    place: PrivatePlace,
    folder: Path,
) -> Settings:
    """Return the daemon's options, from flags, environment and config file.

    The config file may be the node's, so its values for socket, group, cache folder and HTTP are
    ignored.

    Args:
        flags: the options on the command line.
        config: path of the config file; None for the default one.
        place: the place of the daemon's socket.
        folder: the daemon's cache folder.
    """
    from shardcache.config.option_sources import VARIABLE_PREFIX
    from shardcache.config.settings import Settings

    prefix = VARIABLE_PREFIX.lower()
    variables = [name.lower() for name in os.environ]
    set_by_env = {name.removeprefix(prefix) for name in variables if name.startswith(prefix)}
    set_names = set_by_env | flags.keys()
    # The capacity is half of the space that would be free without this cache, so that it is the
    # same at each start.
    cached_bytes = sum(path.stat().st_size for path in folder.glob("shards/*/*"))
    spare_bytes = free_bytes(folder) + cached_bytes
    defaults: Json = {"capacity": spare_bytes // 2, "idle_exit_s": _IDLE_EXIT_S}
    unset_defaults = {name: value for name, value in defaults.items() if name not in set_names}
    fixed = {
        "socket": place.socket,
        "cache_dir": folder,
        "group": None,
        "http": None,
        "http_token_file": None,
    }
    return Settings.load({**flags, **fixed, **unset_defaults}, config)


def _serve(
    settings: Settings,
    place: PrivatePlace,
    second_place: PrivatePlace,
    write_fd: int,
    locks: Iterable[int],
) -> NoReturn:
    """Run the daemon in this process, which outlives its terminal, job and parent.

    Args:
        settings: the daemon's options.
        place: the place where processes of this environment look first.
        second_place: the place in the cache folder.
        write_fd: descriptor of the pipe for the outcome of the start.
        locks: descriptors of the locks to release once the daemon serves.
    """

    def on_ready(store: Store) -> None:
        """Report the outcome, and release the locks, once the daemon serves."""
        os.utime(settings.cache_dir)  # records the time of last use for `remove_old_caches`
        _report(
            write_fd,
            socket=str(place.socket),
            started=True,
            cache_dir=str(settings.cache_dir),
            capacity_bytes=store.space.capacity_bytes,
            pid=os.getpid(),
        )
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_UN)
        threading.Thread(target=remove_old_caches, args=(settings.cache_dir,), daemon=True).start()

    _detach(place.log)
    # Garbage collection would make the imports a tenth slower. The daemon enables it later.
    gc.disable()
    try:
        from shardcache.daemon.running import serve

        second_place.record_cache(second_place.folder)
        second_socket = second_place.socket if second_place.is_usable else None
        serve(settings, on_ready, is_private=True, second_socket=second_socket)
    except ShardcacheError as exn:
        _report(write_fd, error=exn.to_json())
        raise
    os.utime(settings.cache_dir)  # records the time of last use for `remove_old_caches`
    sys.exit()


def _detach(log: Path) -> None:
    """Detach this process from its parent's terminal, folder, CPUs, niceness and service manager.

    Args:
        log: file for the output of this process.
    """
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    for name in _MANAGER_VARIABLES:
        os.environ.pop(name, None)
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with suppress(OSError):  # only privileged users may lower their niceness
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    if os.fstat(output).st_size > _MAX_LOG_BYTES:
        os.ftruncate(output, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), _STDIN)
    os.dup2(output, _STDOUT)
    os.dup2(output, _STDERR)


def _report(write_fd: int, **outcome: Any) -> None:
    """Send the outcome of the start to the parent process, and close the pipe."""
    os.write(write_fd, json.dumps(outcome).encode())
    os.close(write_fd)


def _wait_for_outcome(read_fd: int, place: PrivatePlace, pid: int) -> Json:
    """Wait until the daemon reports the outcome of its start, and return the outcome.

    Raises the error that the daemon reports, or else DaemonError if it ended without a report, and
    NoDaemonError if it was killed, since another attempt may succeed.

    Args:
        read_fd: descriptor of the pipe.
        place: the daemon's place.
        pid: process id of the daemon.
    """
    with os.fdopen(read_fd, "rb") as file:
        report = file.read()
    if not report:  # the daemon has ended, and thus closed its end of the pipe
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            raise NoDaemonError(
                f"the private daemon was killed before it was ready (signal {os.WTERMSIG(status)})",
                remedy="see in dmesg whether the kernel ended it for lack of memory; if so, "
                "free some",
            )
        raise DaemonError(
            "the private daemon ended before it was ready",
            remedy=f"see its log: tail {place.log}",
        )
    outcome: Json = json.loads(report)
    if "error" in outcome:
        raise from_json(outcome["error"])
    return outcome
