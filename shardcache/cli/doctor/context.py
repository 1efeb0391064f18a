"""The context of the checks: the options that a daemon here would have, and the daemon that answers, if any."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.access.peer import credentials
from shardcache.cli.client import AdminClient
from shardcache.config import CONFIG_ENV, DEFAULT_CONFIG, Settings
from shardcache.errors import ConfigError, NoDaemonError, ShardcacheError
from shardcache.protocol import socket_path

ANSWER_LIMIT_S = 10.0
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that answers.

    Attributes:
        page: its status page.
        uid: id of the user it runs as; None if unknown.
        pid: its process id; None if it is not visible from this PID namespace.
    """

    page: Mapping[str, Any]
    uid: int | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Case:
    """The context that all checks share.

    Attributes:
        flags: options given on the command line.
        config: the config file that is, or would be, read.
        settings: options from flags, environment and file; None if they are invalid or cannot be read.
        config_error: the reason that there are no settings.
        socket: path at which the daemon is expected.
        running: the daemon there; None if none answers.
        silence: the reason that none answers.
        urls: urls to probe.
        quick: True to skip measurements.
    """

    flags: Mapping[str, Any]
    config: Path
    settings: Settings | None
    config_error: ConfigError | None
    socket: Path
    running: Running | None
    silence: ShardcacheError | None
    urls: tuple[str, ...] = ()
    quick: bool = False

    @property
    def is_operators(self) -> bool:
        """True if the current user runs the daemon, or would; others only read from its cache."""
        return self.running is None or os.geteuid() in (0, self.running.uid)

    @property
    def cache_dir(self) -> Path | None:
        """The daemon's cache folder; without a daemon, the one it would use."""
        if self.running is not None:
            return Path(self.running.page["cache"]["dir"])
        return None if self.settings is None else self.settings.cache_dir

    @property
    def config_is_kept(self) -> bool:
        """True if there is a config file that the current user may not read."""
        try:
            return self.config.is_file() and not os.access(self.config, os.R_OK)
        except PermissionError:  # nor its folder
            return True


async def take(flags: Mapping[str, Any], config: Path | None, urls: Sequence[str] = (), *, quick: bool = False) -> Case:
    """Read the options and query the daemon. Raises DaemonError as `socket_path` does."""
    settings, config_error = _settings(flags, config)
    chosen = settings.socket if settings is not None else flags.get("socket")
    socket = socket_path(chosen)
    running, silence = await _ask(socket)
    file = config or Path(os.environ.get(CONFIG_ENV) or DEFAULT_CONFIG)
    return Case(flags, file, settings, config_error, socket, running, silence, tuple(urls), quick)


def _settings(flags: Mapping[str, Any], config: Path | None) -> tuple[Settings | None, ConfigError | None]:
    try:
        return Settings.load(flags, config), None
    except ConfigError as exn:
        return None, exn


async def _ask(socket: Path) -> tuple[Running | None, ShardcacheError | None]:
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S), AdminClient(socket) as daemon:
            page = await daemon.status()
    except TimeoutError:
        silence = f"the daemon accepts connections but does not answer within {ANSWER_LIMIT_S:g} s"
        return None, NoDaemonError(silence, url=str(socket))
    except ShardcacheError as exn:
        return None, exn
    return _seen(page, *_listener(socket)), None


def _listener(path: Path) -> tuple[int, int | None]:
    """Return the pid and uid of the process that bound a socket: the daemon or its service manager."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:  # the daemon has stopped since
            return 0, None
        pid, uid, _gid = credentials(probe)
    return pid, uid


def _seen(page: Mapping[str, Any], listener_pid: int, listener_uid: int | None) -> Running:
    """Return the daemon as seen in /proc: in another PID namespace, its pid may belong to another process."""
    pid, folder = page["pid"], _PROC / str(page["pid"])
    try:
        if pid == listener_pid or b"shardcache" in (folder / "cmdline").read_bytes():
            return Running(page, folder.stat().st_uid, pid)
    except OSError:
        pass
    return Running(page, listener_uid, None)
