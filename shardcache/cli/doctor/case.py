"""What is examined: the options a daemon here would have, and the daemon that answers, if one does."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.cli.client import AdminClient
from shardcache.config import CONFIG_ENV, DEFAULT_CONFIG, Settings
from shardcache.errors import ConfigError, NoDaemonError, ShardcacheError
from shardcache.protocol import socket_path

ANSWER_LIMIT_S = 10.0
_UCRED = struct.Struct("iII")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that answers.

    Attributes:
        page: its status.
        uid: the user it runs as; None where that cannot be told.
        pid: its process, where this one can see it.
    """

    page: Mapping[str, Any]
    uid: int | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that checks look at.

    Attributes:
        flags: options given on the command line.
        config: the config file that is, or would be, read.
        settings: options by flags, environment and file; None where they make no sense or cannot be read.
        config_error: why not.
        socket: where the daemon is expected.
        running: the daemon there; None where none answers.
        silence: why none answers.
        urls: given to be tried.
        quick: whether nothing is measured.
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
        """Whether the present user runs the daemon, or would; others only read from its cache."""
        return self.running is None or os.geteuid() in (0, self.running.uid)

    @property
    def cache_dir(self) -> Path | None:
        """The daemon's folder; without a daemon, the one it would take."""
        if self.running is not None:
            return Path(self.running.page["cache"]["dir"])
        return None if self.settings is None else self.settings.cache_dir

    @property
    def config_is_kept(self) -> bool:
        """Whether there is a config file that the present user may not read."""
        try:
            return self.config.is_file() and not os.access(self.config, os.R_OK)
        except PermissionError:  # not even its folder
            return True


async def take(flags: Mapping[str, Any], config: Path | None, urls: Sequence[str] = (), *, quick: bool = False) -> Case:
    """Read the options and ask for the daemon. Raises DaemonError as `socket_path` does."""
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
        silence = f"the daemon takes connections and answers nothing within {ANSWER_LIMIT_S:g} s"
        return None, NoDaemonError(silence, url=str(socket))
    except ShardcacheError as exn:
        return None, exn
    return _seen(page, *_listener(socket)), None


def _listener(path: Path) -> tuple[int, int | None]:
    """Return the pid and uid of who began to listen at a socket; a service manager may have, for the daemon."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:  # it has gone since
            return 0, None
        pid, uid, _gid = _UCRED.unpack(probe.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size))
    return pid, uid


def _seen(page: Mapping[str, Any], listener_pid: int, listener_uid: int | None) -> Running:
    """Return the daemon as /proc knows it: in another pid namespace, its number is somebody else's."""
    pid, folder = page["pid"], _PROC / str(page["pid"])
    try:
        if pid == listener_pid or b"shardcache" in (folder / "cmdline").read_bytes():
            return Running(page, folder.stat().st_uid, pid)
    except OSError:
        pass
    return Running(page, listener_uid, None)
