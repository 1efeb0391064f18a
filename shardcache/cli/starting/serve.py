"""The commands `serve` and `stop`, which start and stop a daemon.

A private daemon is one that a single user has started, in contrast to the daemon of the node.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.starting.settings_options import SettingsCommand, config_option, given_options
from shardcache.shared.exceptions import ConfigError, DaemonError, NoDaemonError, ShardcacheError
from shardcache.shared.private import PrivatePlace
from shardcache.shared.protocol import Json
from shardcache.shared.unix_socket import connected, peer_ids

_CONNECT_LIMIT_S = 10.0
_STOP_LIMIT_S = 60.0  # from SIGTERM to the daemon's end


@common.examples(
    "serve --cache-dir /nvme/shardcache --capacity 500GB",
    "serve --config /etc/shardcache/shardcache.toml",
)
@click.command(
    cls=SettingsCommand,
    short_help="Run this node's daemon.",
    epilog="Each option is also an environment variable (SHARDCACHE_PART_SIZE) and a key of "
    "the config file (part_size). Flags override the environment, which overrides "
    "the file.",
)
@config_option
@click.option(
    "--private",
    is_flag=True,
    help="Start your own daemon in the background, and return once it is ready. Training "
    "does this by itself on a node without a daemon.",
)
@common.json_option
def serve(config_path: Path | None, *, private: bool, as_json: bool, **flags: Any) -> None:
    """Run this node's daemon until SIGTERM or Ctrl-C.

    The daemon needs a folder on a local disk, and credentials for the object store. It finds these
    in the usual places (environment, profile, instance role) or in an [[origin]] table of the
    config file.
    """
    options = given_options(flags)
    if private:
        _start_private(options, config_path, as_json=as_json)
        return

    from shardcache.config.settings import Settings
    from shardcache.daemon.running import serve as run_daemon

    run_daemon(Settings.load(options, config_path))


def _start_private(options: Mapping[str, Any], config_path: Path | None, *, as_json: bool) -> None:
    """Start this user's private daemon, unless it runs already, and print its socket.

    Args:
        options: the options of `serve` on the command line, by name.
        config_path: path of the config file; None for the default one.
        as_json: True to print JSON.
    """
    from shardcache.cli.starting.private_daemon import start

    if "socket" in options:
        raise ConfigError(
            "a private daemon chooses its own socket, where your processes find it",
            remedy="omit --socket",
        )
    daemon = start(options, config_path)
    if as_json:
        common.print_json(daemon)
    else:
        state = "ready" if daemon["started"] else "runs already"
        click.echo(f"{state}: {daemon['socket']}; to stop it: shardcache stop")


@common.examples("stop", "stop --socket /run/shardcache/shardcache.sock")
@click.command()
@click.option("--yes", is_flag=True, help="Stop without asking, even if readers are attached.")
@common.query_options
def stop(yes: bool, as_json: bool, socket: Path | None) -> None:
    """Stop your private daemons, or the daemon at a socket.

    Waits until the daemon has ended. Cached shards stay on disk for the next start. Attached
    readers wait for the next daemon; those of a private daemon start one. On a terminal, the
    command asks first if readers are attached.
    """
    can_ask = sys.stdin.isatty() and not yes and not as_json
    private_sockets = PrivatePlace.find().running_sockets()
    sockets = private_sockets if socket is None else [socket]
    if not sockets:
        raise NoDaemonError(
            "you have no private daemon running here",
            remedy="to stop another daemon, pass its --socket",
        )
    stopped = []
    errors = []
    for path in sockets:
        is_private = path in private_sockets
        try:
            is_stopped = _stop_if_confirmed(path, is_private=is_private, can_ask=can_ask)
        except ShardcacheError as exn:
            errors.append(exn)  # the next daemons are stopped first
            continue
        if is_stopped:
            stopped.append(path)
            if not as_json:
                click.echo(f"stopped: {path}")
    if as_json and (stopped or not errors):
        common.print_json({"stopped": list(map(str, stopped))})
    if errors:
        raise errors[0]
    if len(stopped) < len(sockets):
        common.fail()


def _stop_if_confirmed(path: Path, *, is_private: bool, can_ask: bool) -> bool:
    """Stop the daemon at a socket; return False if the user declines.

    Raises NoDaemonError, DaemonError and ProtocolError.

    Args:
        path: path of the socket.
        is_private: True for a private daemon.
        can_ask: True to ask the user first if readers are attached.
    """
    status = AdminClient(path).status()
    warning = _readers_warning(status, is_private=is_private)
    if warning:
        click.echo(f"{path}: {warning}", err=True)
        if can_ask and not click.confirm("Stop it?", err=True):
            return False
    # These errors show that the daemon has ended since it reported its status.
    with suppress(FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
        _stop(path, status["pid"])
    return True


def _readers_warning(status: Json, *, is_private: bool) -> str:
    """Return a warning with the number of a daemon's readers, and what they do when it stops.

    The warning is empty if the daemon has no readers.

    Args:
        status: the daemon's status.
        is_private: True for a private daemon, whose readers start another.
    """
    readers = sum(job["sessions"] for job in status["jobs"])
    if not readers:
        return ""
    attached = f"{common.quantity(readers, 'reader')} attached"
    pronoun = "it" if readers == 1 else "they"
    if is_private:
        return f"{attached}; {pronoun} will start another"
    return f"{attached}; {pronoun} will wait for the next one"


def _stop(path: Path, reported_pid: int) -> None:
    """Send SIGTERM to the daemon that listens at a socket, and wait for its end.

    Raises DaemonError; FileNotFoundError, ConnectionRefusedError or ProcessLookupError if the
    daemon has ended already.

    Args:
        path: path of the socket.
        reported_pid: process id of the daemon, according to its status.
    """
    with connected(path, _CONNECT_LIMIT_S) as sock:
        pid, _, _ = peer_ids(sock)
    if pid != reported_pid:
        # A service manager has opened the socket, or the daemon runs in another PID namespace.
        raise DaemonError(
            "the daemon's socket was opened by another process",
            url=str(path),
            remedy="stop the daemon where it was started: by its service manager, or in its "
            "container",
        )
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        ended, _, _ = select.select([pidfd], [], [], _STOP_LIMIT_S)
        if not ended:
            raise DaemonError(
                f"the daemon did not stop within {_STOP_LIMIT_S:g} s",
                url=str(path),
                remedy=f"kill -9 {pid}",
            )
    except PermissionError as exn:
        raise DaemonError(
            "the daemon belongs to another user",
            url=str(path),
            remedy="ask its administrator",
        ) from exn
    finally:
        os.close(pidfd)
