"""Checks of the daemon for `shardcache doctor`: its socket, its state, and its options.

`runner` calls the public functions. Each returns a finding, a line of the report, or None if there
is nothing to check. A shard is refused if what the object store sent for it is invalid.
"""

import os
import shlex

from shardcache.cli.common import quantity
from shardcache.cli.doctor.context import (
    Context,
    Finding,
    error_finding,
    failed,
    listener_of,
    ok,
    skipped,
    start_command,
    warning,
)
from shardcache.cli.doctor.path_access import access_fix, blocking_path, permissions_of
from shardcache.shared.exceptions import DaemonError
from shardcache.shared.private import tool_socket
from shardcache.shared.socket_paths import SOCKET_ENV
from shardcache.shared.units import duration, user_name
from shardcache.shared.unix_socket import MAX_SOCKET_BYTES

_MAX_SILENCE_S = 10.0  # a disk that has not responded for longer counts as hung


def check_socket_path(context: Context) -> Finding:
    """Check the socket's path, and that clients look for the socket there."""
    socket = context.socket
    path_bytes = len(os.fsencode(socket))
    if path_bytes > MAX_SOCKET_BYTES:
        cause = f"the path has {path_bytes} bytes; the kernel's limit is {MAX_SOCKET_BYTES}"
        return failed(
            f"{socket} is too long for a socket",
            cause,
            "shardcache serve --socket /run/user/$UID/s.sock",
        )
    if "socket" in context.flags:
        return ok(f"{socket} (--socket)")
    try:
        clients_socket = tool_socket()
    except DaemonError as exn:
        return error_finding(exn)
    if clients_socket != socket:
        cause = "only the config file names it, which training processes do not read"
        remedy = f"export {SOCKET_ENV}={shlex.quote(str(socket))}   # where training runs"
        return warning(f"{socket}, but clients look at {clients_socket}", cause, remedy)
    if os.environ.get(SOCKET_ENV):
        return ok(f"{socket} (${SOCKET_ENV})")
    return ok(f"{socket} (where clients look by default)")


def check_listener(context: Context) -> Finding:
    """Check that a daemon listens at the socket, and that this user may connect to it."""
    socket = context.socket
    start = start_command(context)  # the remedy if no daemon runs
    try:
        listener_of(socket)
    except PermissionError:
        blocking = blocking_path(socket, os.W_OK)
        cause = "the kernel denies access"
        remedy = f"ls -l {shlex.quote(str(socket))}"
        if blocking:
            cause, remedy = access_fix(blocking)
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
    return ok(f"shardcache {version}, pid {pid}, run by {user}; {permissions_of(socket)}")


def check_health(context: Context) -> Finding | None:
    """Check the state of the daemon and of its disk, as the daemon reports it."""
    if context.status is None:
        return None
    disk = context.status.get("disk") or {}
    if disk.get("silent_s", 0) > _MAX_SILENCE_S:
        found = f"the cache disk has not responded for {duration(disk['silent_s'])}"
        cause = "a device or a network filesystem hangs; all disk operations are blocked"
        return failed(found, cause, "dmesg | tail -50")
    error = disk.get("error")
    if error:
        cause = "cached shards are served, but nothing new is fetched"
        return failed(error["message"], cause, error["remedy"])
    if context.status.get("draining"):
        return failed(
            "the daemon is stopping",
            "it is shutting down, and finishes running requests",
            "systemctl start shardcache   # once it has stopped",
        )
    return ok("it is serving, and its disk is healthy")


def check_refused_shards(context: Context) -> Finding | None:
    """Report the number of shards that the daemon refused on arrival, and the last refusal."""
    if context.status is None or not context.status.get("refused"):
        return None
    errors = context.status["refused"]
    last = errors[-1]
    found = f"{quantity(len(errors), 'shard')} refused on arrival, last {last['url']}"
    cause = f"{last['code']}: {last['message']}"
    return warning(found, cause, last["remedy"], shards=len(errors))


def check_options(context: Context) -> Finding:
    """Check that the options of config file, environment and flags are valid."""
    config = context.config
    blocking = blocking_path(config, os.R_OK)
    is_missing = blocking is not None and not os.path.lexists(blocking)
    if blocking is not None and not is_missing:
        return skipped(f"you may not read {config}; its contents are not checked")
    if context.config_error is not None:
        return error_finding(context.config_error, "the daemon does not start with it")
    if is_missing:
        return ok(f"no file at {config}: options come from flags and environment")
    return ok(f"{config} is valid")
