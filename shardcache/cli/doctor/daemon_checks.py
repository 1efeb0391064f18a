"""Checks of the daemon for `shardcache doctor`: its socket, its state, and its options.

`runner` calls the public functions. Each returns a finding, a line of the report, or None if there
is nothing to check.
"""

import os
import shlex
from contextlib import suppress

from shardcache.cli.common import quantity
from shardcache.cli.doctor.context import (
    Context,
    Finding,
    failed,
    finding_of,
    listener_of,
    ok,
    skipped,
    start_command,
    warning,
)
from shardcache.cli.doctor.path_access import access_fix, barrier, permissions_of
from shardcache.errors import DaemonError
from shardcache.shared.private import tool_socket
from shardcache.shared.socket_paths import SOCKET_ENV
from shardcache.shared.units import duration, user_name
from shardcache.shared.unix_socket import MAX_SOCKET_BYTES

_SILENT_S = 10.0  # a disk that has not responded for longer counts as hung


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
    start = start_command(context)  # the remedy if no daemon runs
    try:
        listener_of(socket)
    except PermissionError:
        blocking = barrier(socket, os.W_OK)
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


def health(context: Context) -> Finding | None:
    """Check the state of the daemon and of its disk, as its status page reports it."""
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
    """Report the shards that the daemon refused on arrival: their number, and the last of them."""
    errors = None if context.status is None else context.status.get("refused")
    if not errors:
        return None
    last = errors[-1]
    found = f"{quantity(len(errors), 'shard')} refused on arrival, last {last['url']}"
    return warning(found, f"{last['code']}: {last['message']}", last["remedy"], shards=len(errors))


def options(context: Context) -> Finding:
    """Check that the options are valid."""
    config = context.config
    error = context.config_error
    blocking = barrier(config, os.R_OK)
    is_denied = blocking is not None and os.path.lexists(blocking)
    if is_denied:
        return skipped(f"you may not read {config}; its contents are not checked")
    if error is not None:
        return finding_of(error, "the daemon does not start with it")
    if blocking is not None:  # the file does not exist
        return ok(f"no file at {config}: options come from flags and environment")
    return ok(f"{config} is valid")
