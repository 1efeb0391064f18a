"""Checks of the daemon: its socket, protocol and health, and the options that it has or would have."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress

from shardcache.cli.doctor.context import (
    STORE_VARIABLES,
    Context,
    Finding,
    connect,
    failed,
    of_error,
    ok,
    skipped,
    warning,
)
from shardcache.cli.doctor.paths import barrier, way_in, who_may
from shardcache.errors import DaemonError
from shardcache.private import tool_socket
from shardcache.protocol import SOCKET_ENV
from shardcache.units import duration, user_name

_MAX_SOCKET_BYTES = 107
_SILENT_S = 10.0


def path(context: Context) -> Finding:
    """Check the socket's path, and that clients look for the socket there."""
    socket = context.socket
    length = len(os.fsencode(socket))
    if length > _MAX_SOCKET_BYTES:
        cause = f"the path has {length} bytes; the kernel's limit is {_MAX_SOCKET_BYTES}"
        return failed(f"{socket} is too long for a socket", cause, "shardcache serve --socket /run/user/$UID/s.sock")
    if "socket" in context.flags:
        return ok(f"{socket} (--socket)")
    theirs = None
    with suppress(DaemonError):
        theirs = tool_socket()
    if theirs != socket:
        cause = "only the config file names it, which training processes do not read"
        remedy = f"export {SOCKET_ENV}={shlex.quote(str(socket))}   # where training runs"
        return warning(f"{socket}, but clients look at {theirs}", cause, remedy)
    return ok(f"{socket} ({f'${SOCKET_ENV}' if os.environ.get(SOCKET_ENV) else 'where clients look by default'})")


def listener(context: Context) -> Finding:
    """Connect to the socket as clients do."""
    socket = context.socket
    try:
        connect(socket)
    except PermissionError:
        closed = barrier(socket, os.W_OK)
        cause, remedy = way_in(closed) if closed else ("the kernel denies access", f"ls -l {shlex.quote(str(socket))}")
        return failed(f"you may not use {socket}", cause, remedy)
    except FileNotFoundError:
        cause = "none was started; or, in a container, the socket's folder is not mounted"
        return warning(f"no daemon: there is no socket at {socket}", cause, _start(context))
    except ConnectionRefusedError:
        if not socket.is_socket():
            return failed(f"{socket} is not a socket", "another file is there", f"rm {shlex.quote(str(socket))}")
        cause = "it was left behind by a daemon that was killed; the next one replaces it"
        return warning(f"no daemon listens at {socket}", cause, _start(context))
    except OSError as exn:
        return failed(f"cannot connect to {socket}", exn.strerror or str(exn), _start(context))
    if context.status is None:
        cause = "" if context.daemon_error is None else context.daemon_error.message
        remedy = "journalctl -u shardcache -n 100   # or its own log; then: systemctl restart shardcache"
        return failed(f"the server at {socket} returns no status", cause, remedy)
    user = "an unknown user" if context.uid is None else user_name(context.uid)
    version, pid = context.status["version"], context.status["pid"]
    return ok(f"shardcache {version}, pid {pid}, run by {user}; {who_may(socket)}")


def _start(context: Context) -> str:
    words = ["shardcache", "serve"]
    for flag, value in context.flags.items():
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
        return failed(error["message"], "cached shards are served, but nothing new is fetched", error["remedy"])
    if context.status.get("draining"):
        cause = "it is shutting down, and finishes running requests"
        return failed("the daemon is stopping", cause, "systemctl start shardcache   # once it has stopped")
    return ok("it is serving, and its disk is healthy")


def config_file(context: Context) -> Finding:
    """Check that the options are valid."""
    config, error = context.config, context.config_error
    try:
        exists = config.is_file()
        readable = not exists or os.access(config, os.R_OK)
    except PermissionError:  # its folder is closed
        readable = False
    if not readable:
        return skipped(f"you may not read {config}; its contents are not checked")
    if error is not None:
        return of_error(error, "the daemon does not start with it")
    return ok(f"{config} is valid" if exists else f"no file at {config}: options come only from flags and environment")


def environment(context: Context) -> Finding | None:
    """Name the variables that differ from the daemon's; their values may be secrets."""
    if context.environment is None:
        return None
    differing = context.environment.items() ^ os.environ.items()
    names = sorted({name for name, _ in differing if STORE_VARIABLES.match(name)})
    return ok(f"these variables differ from the daemon's, whose apply: {', '.join(names)}") if names else None
