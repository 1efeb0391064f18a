"""Checks of the socket: its path, this user's access to it, and the daemon listening there."""

from __future__ import annotations

import os
import shlex
import socket as sockets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardcache.cache.operations.origin_probe.findings import Finding, failed, ok, warning
from shardcache.cli.doctor.blocking import in_thread
from shardcache.cli.doctor.context import Case
from shardcache.cli.doctor.users import barrier, user_name, way_in, who_may
from shardcache.errors import DaemonError
from shardcache.protocol import SOCKET_ENV, SYSTEM_SOCKET, socket_path

_MOST_BYTES = 107


async def examine(case: Case) -> list[Finding]:
    """Locate the socket as clients do, and connect to it."""
    return [_path(case), await in_thread(_listening, case)]


def _path(case: Case) -> Finding:
    name, path = "socket.path", case.socket
    if len(os.fsencode(path)) > _MOST_BYTES:
        cause = f"the path has {len(os.fsencode(path))} bytes; the kernel's limit is {_MOST_BYTES}"
        return failed(
            name,
            f"{path} is too long for a socket",
            cause,
            "shardcache serve --socket /run/user/$UID/s.sock",
        )
    if "socket" not in case.flags and (theirs := _where_clients_look()) != path:
        cause = "only the config file names it, which training processes do not read"
        remedy = f"export {SOCKET_ENV}={shlex.quote(str(path))}   # where training runs"
        return warning(name, f"{path}, but clients look at {theirs}", cause, remedy)
    return ok(name, f"{path} ({_chosen_by(case)})")


def _where_clients_look() -> Path | None:
    try:
        return socket_path()
    except DaemonError:
        return None


def _chosen_by(case: Case) -> str:
    if "socket" in case.flags:
        return "--socket"
    if os.environ.get(SOCKET_ENV):
        return f"${SOCKET_ENV}"
    return "where clients look by default"


def _listening(case: Case) -> Finding:
    name, path = "socket.daemon", case.socket
    try:
        _knock(path)
    except PermissionError:
        return _refused(path)
    except FileNotFoundError:
        return warning(name, f"no daemon: there is no socket at {path}", _elsewhere(path), _start(case))
    except ConnectionRefusedError:
        if not path.is_socket():
            return failed(name, f"{path} is not a socket", "another file is there", f"rm {shlex.quote(str(path))}")
        cause = "it was left behind by a daemon that was killed; the next one replaces it"
        return warning(name, f"no daemon listens at {path}", cause, _start(case))
    except OSError as exn:
        return failed(name, f"cannot connect to {path}", exn.strerror or str(exn), _start(case))
    return _answering(case)


def _knock(path: Path) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.connect(os.fspath(path))


def _refused(path: Path) -> Finding:
    closed = barrier(path, os.W_OK)
    cause, remedy = way_in(closed) if closed else ("the kernel denies access", f"ls -l {shlex.quote(str(path))}")
    return failed("socket.daemon", f"you may not use {path}", cause, remedy)


def _answering(case: Case) -> Finding:
    name, running = "socket.daemon", case.running
    if running is None:
        cause = "" if case.silence is None else case.silence.message
        remedy = "journalctl -u shardcache -n 100   # or its own log; then: systemctl restart shardcache"
        return failed(name, f"the server at {case.socket} returns no status", cause, remedy)
    who = "an unknown user" if running.uid is None else user_name(running.uid)
    found = f"shardcache {running.page['version']}, pid {running.page['pid']}, run by {who}; {who_may(case.socket)}"
    return ok(name, found)


def _start(case: Case) -> str:
    flags = [word for flag, value in case.flags.items() for word in _words(flag, value)]
    return shlex.join(["shardcache", "serve", *flags])


def _words(flag: str, value: object) -> Iterator[str]:
    for each in value if isinstance(value, tuple) else (value,):
        yield from ("--" + flag.replace("_", "-"), str(each))


def _elsewhere(path: Path) -> str:
    others = [other for other in _candidates(os.environ) if other != path and _listens(other)]
    if others:
        return f"one listens at {others[0]}: export {SOCKET_ENV}={shlex.quote(str(others[0]))}, or --socket"
    return "none was started; or, in a container, the socket's folder is not mounted"


def _candidates(env: Mapping[str, str]) -> Iterator[Path]:
    yield SYSTEM_SOCKET
    if env.get("XDG_RUNTIME_DIR"):
        yield Path(env["XDG_RUNTIME_DIR"]) / "shardcache" / SYSTEM_SOCKET.name
    yield Path(tempfile.gettempdir()) / f"shardcache-{os.getuid()}" / SYSTEM_SOCKET.name


def _listens(path: Path) -> bool:
    try:
        _knock(path)
    except OSError:
        return False
    return True
