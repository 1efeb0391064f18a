"""`shardcache serve --private`.

This user's own daemon, in the background, with its cache on a local disk.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardcache.errors import CacheDirError, DaemonError, NoDaemonError, ShardcacheError, from_json
from shardcache.shared.private import (
    PrivatePlace,
    digest,
    is_digest,
    is_file_limit,
    is_listening,
    locked,
    secured,
    try_lock,
)
from shardcache.shared.protocol import Json
from shardcache.store.disk.mounts import free_bytes, mount_of

if TYPE_CHECKING:
    from shardcache.config.settings import Settings
    from shardcache.store.store import Store

_IDLE_EXIT_S = 600.0
# A user's daemons on one node that do not see each other's sockets, as in containers, or that have
# other credentials.
_MAX_FOLDERS = 16
# Locked while one of these folders is chosen, until a daemon has locked that.
_BASE_LOCK = "folders.lock"
# A cache of other credentials is removed once it was not used for as long.
_OLD_S = 86_400.0
_MAX_LOG_BYTES = 1024 * 1024
# A service manager's variables are for the process that it started, which is this one's ancestor.
_OF_MANAGERS = (
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)
# A job's limits for its own processes; not that of core files, which would contain credentials.
_LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
)
# A scheduler's names for the folder of a job on the node's own disk, and those by which a job is
# recognised.
_SCRATCH = ("SLURM_TMPDIR", "PBS_JOBFS", "_CONDOR_SCRATCH_DIR", "LSF_TMPDIR")
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "SGE_TASK_ID")


def start(flags: Mapping[str, Any], config: Path | None) -> Json:
    """Start the private daemon of this environment, unless it runs; return where it serves.

    Raises the errors of `shardcache serve`; CacheDirError if there is no local disk for the cache;
    DaemonError if the daemon ends before it serves; NoDaemonError if it was killed.
    """
    _raise_limits()
    place = PrivatePlace.find()
    env = dict(os.environ)
    if "cache_dir" in flags:
        env["SHARDCACHE_CACHE_DIR"] = flags["cache_dir"]
    base = cache_base(env)
    with _errors_of_cache():
        name = digest(base)
    with ExitStack() as stack:
        lock = stack.enter_context(locked(place.lock, is_inherited=True))
        base_lock = stack.enter_context(locked(base / _BASE_LOCK, is_inherited=True))
        if is_listening(place.socket):
            if not place.shows_cache():
                raise NoDaemonError(
                    "a private daemon has just been started, but this process cannot see its cache",
                    remedy="try again",
                )
            return {"socket": str(place.socket), "started": False}
        with _errors_of_cache():
            other = _place_in_cache(base, name)
            if other is not None:
                place.lead_to(other)
                place.record_cache(other.folder)
                return {"socket": str(place.socket), "started": False}
            folder = _free_folder(base, name)
        if place.socket.is_symlink():  # to a daemon that has ended
            place.socket.unlink()
        place.record_cache(folder)
        settings = _settings(flags, config, place, folder)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            second = PrivatePlace.in_cache(folder, base)
            _serve(settings, (place, second), writer, (lock, base_lock))
        os.close(writer)
        return _outcome(reader, place, pid)


def _raise_limits() -> None:
    """Raise the job's soft limits, which are not meant for the daemon, to the hard ones.

    Before anything is written, as one of them is for the size of files.
    """
    for kind in _LIMITS:
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))


def cache_base(env: Mapping[str, str]) -> Path:
    """Return the folder of this user's private caches, created if it is missing.

    No file of it is another user's. In order of precedence: `$SHARDCACHE_CACHE_DIR`; the job's own
    folder on a local disk, if its scheduler names one; the user's cache folder. Raises
    CacheDirError if that is on a network filesystem or cannot be used.
    """
    named = env.get("SHARDCACHE_CACHE_DIR")
    if named:
        base = Path(named).resolve()
    else:
        home = env.get("XDG_CACHE_HOME")
        of_user = Path(home) if home else Path.home() / ".cache"
        base = next(_scratch(env), of_user / "shardcache-private")
    base = base.absolute()  # the daemon leaves this folder
    mount = mount_of(base)
    if mount.is_network:
        raise CacheDirError(
            f"{base} is on a network filesystem ({mount.kind} at {mount.folder}), where a cache "
            "would gain nothing",
            remedy="export SHARDCACHE_CACHE_DIR=/path/on/local/disk",
        )
    with _errors_of_cache():
        return secured(base, denied=0o022)


@contextmanager
def _errors_of_cache() -> Iterator[None]:
    """Name the cache's variable in the errors of its folder, not that of the sockets' folder."""
    try:
        yield
    except DaemonError as exn:
        if is_file_limit(exn.__cause__):  # wherever the folder is
            raise
        raise CacheDirError(
            f"no place for the cache: {exn.message}",
            remedy="export SHARDCACHE_CACHE_DIR=…, a folder of your own on a local disk",
        ) from exn


def _scratch(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield a folder in each place on a local disk that a scheduler made for this job."""
    names = list(_SCRATCH)
    if any(env.get(name) for name in _JOBS):
        names.append("TMPDIR")
    for folder in [Path(env[name]) for name in names if env.get(name)]:
        mount = mount_of(folder)
        # Such a folder is no single job's: it outlives the job, and others fill it.
        is_shared = str(folder) in ("/tmp", "/var/tmp")
        is_local = not (is_shared or mount.is_network or mount.is_memory)
        if is_local and folder.is_dir() and os.access(folder, os.W_OK):
            yield folder / f"shardcache-{os.geteuid()}"


def _place_in_cache(base: Path, name: str) -> PrivatePlace | None:
    """Return the place in its cache of a daemon of this environment that runs; None without one.

    Its socket is elsewhere, or is gone: a logout removes `/run/user/UID`, and a job or container
    may have another `$XDG_RUNTIME_DIR`.
    """
    for number in range(_MAX_FOLDERS):
        folder = base / _folder_name(name, number)
        if not folder.is_dir():
            continue
        place = PrivatePlace.in_cache(folder, base)
        if place.is_usable and is_listening(place.socket) and place.shows_cache():
            return place
    return None


def _folder_name(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name


def _free_folder(base: Path, name: str) -> Path:
    """Return a cache folder for these credentials that no daemon holds.

    None will hold it as long as the caller has the lock of `base`.
    """
    for number in range(_MAX_FOLDERS):
        folder = base / _folder_name(name, number)
        with _held(secured(folder)) as is_free:
            if is_free:
                return folder
    raise CacheDirError(
        f"{_MAX_FOLDERS} private daemons already use folders in {base}", remedy="shardcache stop"
    )


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Take the lock that a daemon has on its cache folder; yield False if another has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def _settings(
    flags: Mapping[str, Any],
    config: Path | None,
    place: PrivatePlace,
    folder: Path,
) -> Settings:
    """Return the daemon's options.

    A config file, which may be the node's, decides all but the places of socket and cache, and the
    cache's size.
    """
    from shardcache.config.option_sources import VARIABLE_PREFIX
    from shardcache.config.settings import Settings

    prefix = VARIABLE_PREFIX.lower()
    given = {name.lower().removeprefix(prefix) for name in os.environ} | flags.keys()
    # Half of the space that would be free without this cache, so that each start gives the same.
    cached_bytes = sum(path.stat().st_size for path in folder.glob("shards/*/*"))
    spare_bytes = free_bytes(folder) + cached_bytes
    defaults: Json = {"capacity": spare_bytes // 2, "idle_exit_s": _IDLE_EXIT_S}
    unset = {name: value for name, value in defaults.items() if name not in given}
    own = {
        "socket": place.socket,
        "cache_dir": folder,
        "group": None,
        "http": None,
        "http_token_file": None,
    }
    return Settings.load({**flags, **own, **unset}, config)


def _serve(
    settings: Settings,
    places: tuple[PrivatePlace, PrivatePlace],
    writer: int,
    locks: Iterable[int],
) -> NoReturn:
    """Be the daemon, in a process of its own that ends with no terminal, job or parent.

    Args:
        places: the one that processes of this environment know, and that in the cache.
    """
    place, in_cache = places

    def on_ready(store: Store) -> None:
        os.utime(settings.cache_dir)
        facts = {
            "cache_dir": str(settings.cache_dir),
            "capacity_bytes": store.space.capacity_bytes,
            "pid": os.getpid(),
        }
        _report(writer, socket=str(place.socket), started=True, **facts)
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_UN)
        threading.Thread(target=_remove_old, args=(settings.cache_dir,), daemon=True).start()

    _detach(place.log)
    gc.disable()  # until the daemon serves: a tenth of the time that its imports take
    try:
        from shardcache.daemon.running import serve

        in_cache.record_cache(in_cache.folder)
        second_socket = in_cache.socket if in_cache.is_usable else None
        serve(settings, on_ready, is_private=True, second_socket=second_socket)
    except ShardcacheError as exn:
        _report(writer, error=exn.to_json())
        raise
    os.utime(settings.cache_dir)
    sys.exit()


def _detach(log: Path) -> None:
    """Give up what this process has inherited and only concerns the one that started it.

    These are the terminal, the process group, the CPUs, the niceness and the service manager.
    """
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    for name in _OF_MANAGERS:
        os.environ.pop(name, None)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with suppress(OSError):  # only some users may become less nice
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    if os.fstat(output).st_size > _MAX_LOG_BYTES:
        os.ftruncate(output, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _report(writer: int, **outcome: Any) -> None:
    """Send the outcome of the start to the process that waits for it in `_outcome`."""
    os.write(writer, json.dumps(outcome).encode())
    os.close(writer)


def _outcome(reader: int, place: PrivatePlace, pid: int) -> Json:
    """Wait for the report of the daemon `pid`, which ends with the daemon at the latest.

    Raises NoDaemonError if the daemon was killed, which another try may mend.
    """
    with os.fdopen(reader, "rb") as file:
        report = file.read()
    if not report:
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


def _remove_old(own: Path) -> None:
    """Remove caches of other credentials that no daemon has used for a day.

    Those of temporary credentials are never used again.
    """
    for other in own.parent.iterdir():
        # The sockets' folder may be the same: its files have such names, too.
        is_cache = is_digest(other.name.partition(".")[0]) and other.is_dir()
        if other == own or not is_cache:
            continue
        times_s = [path.stat().st_mtime for path in (other, other / "partial") if path.exists()]
        if time.time() - max(times_s) > _OLD_S:
            with _held(other) as is_free:
                if is_free:
                    shutil.rmtree(other, ignore_errors=True)
