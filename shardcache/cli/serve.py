"""`shardcache serve`, whose options are the fields of `Settings`, imported only when needed; and `shardcache stop`."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from shardcache.cli.admin_client import AdminClient
from shardcache.cli.common import complete_path, json_option, print_json, socket_option
from shardcache.errors import ConfigError, DaemonError, NoDaemonError
from shardcache.private import PrivatePlace
from shardcache.unix_socket import connected, credentials

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


_ANSWER_S = 10.0
_STOP_S = 60.0


class SettingsCommand(click.Command):
    """A command with one option for each field of `Settings` that the command line can express."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the declared parameters and those of `Settings`."""
        from shardcache.config import Settings

        declared = super().get_params(ctx)
        return [_option(n, f) for n, f in Settings.model_fields.items() if _fits_flag(f)] + declared


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML config file.  [default: $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml if it exists]",
)


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Settings` that are on the command line."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _option(name: str, field: FieldInfo) -> click.Option:
    flag = "--" + name.replace("_", "-")
    is_list = get_origin(field.annotation) is tuple
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return click.Option(
        [flag, name],
        # Everything else stays text, for pydantic to parse.
        type=click.Choice(choices) if choices else str,
        metavar=None if choices else _metavar(field),
        shell_complete=complete_path if _metavar(field) == "PATH" else None,
        multiple=is_list,
        help=_help(field),
    )


def _fits_flag(field: FieldInfo) -> bool:
    """Return False for tables such as `[[origin]]`, which only the config file can express."""
    from pydantic import BaseModel

    members = get_args(field.annotation)
    return not any(isinstance(member, type) and issubclass(member, BaseModel) for member in members)


def _metavar(field: FieldInfo) -> str:
    kinds = get_args(field.annotation) or (field.annotation,)
    for kind, metavar in ((Path, "PATH"), (float, "SECONDS"), (bool, "BOOL")):
        if kind in kinds:
            return metavar
    names = {getattr(kind, "__name__", "") for kind in kinds}
    if names & {"Amount", "ByteSize"}:
        return "SIZE"
    return "N" if int in kinds else "TEXT"


def _help(field: FieldInfo) -> str:
    text = (field.description or "").strip()
    text = text[:1].upper() + text[1:]
    default = field.get_default(call_default_factory=True)
    if default in (None, ()):
        return text
    readable = default.human_readable() if hasattr(default, "human_readable") else default
    return f"{text}  [default: {readable}]"


@click.command(
    cls=SettingsCommand,
    short_help="Run this node's daemon.",
    epilog="Each option is also an environment variable (SHARDCACHE_PART_SIZE) and a key of the config file "
    "(part_size); a flag wins over the environment, the environment over the file.",
)
@config_option
@click.option(
    "--private",
    is_flag=True,
    help="Start this user's own daemon in the background, as training does where none was set up, and return once it "
    "serves.",
)
@json_option
def serve(config: Path | None, *, private: bool, as_json: bool, **flags: Any) -> None:
    """Run this node's daemon until SIGTERM or Ctrl-C.

    Needs a folder on a local disk, and credentials for the object store: from the usual chain (environment, profile,
    instance role) or from an [[origin]] table of the config file.
    """
    if private:
        _start_private(given(flags), config, as_json=as_json)
        return

    from shardcache.config import Settings
    from shardcache.daemon import serve as run_daemon

    run_daemon(Settings.load(given(flags), config))


def _start_private(flags: dict[str, Any], config: Path | None, *, as_json: bool) -> None:
    from shardcache.cli.private_daemon import start

    if "socket" in flags:
        raise ConfigError("a private daemon listens where its user's processes look for it", remedy="omit --socket")
    place = start(flags, config)
    if as_json:
        print_json(place)
    else:
        click.echo(f"{'ready' if place['started'] else 'runs already'}: {place['socket']}; to stop it: shardcache stop")


@click.command()
@json_option
@socket_option
def stop(as_json: bool, socket: Path | None) -> None:
    """Stop this user's private daemons, or the daemon at a socket.

    Waits until they have ended. What they have cached stays, and the next start finds it; readers wait for that start.
    """
    sockets = PrivatePlace.find().running() if socket is None else [socket]
    if not sockets:
        raise NoDaemonError("no private daemon of yours runs here", remedy="for another daemon, pass its --socket")
    for path in sockets:
        _stop(path)
        if not as_json:
            click.echo(f"stopped: {path}")
    if as_json:
        print_json({"stopped": list(map(str, sockets))})


def _stop(path: Path) -> None:
    """Send SIGTERM to the daemon that listens at a socket, and wait for its end."""
    running = AdminClient(path, _ANSWER_S).status()["pid"]
    with connected(path, _ANSWER_S) as sock:
        pid = credentials(sock)[0]
    if pid != running:  # the socket is a service manager's, or the daemon runs in another PID namespace
        raise DaemonError("another process started the daemon's socket", url=str(path), remedy="stop it where it runs")
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _STOP_S)[0]:
            raise DaemonError(f"the daemon has not ended after {_STOP_S:g} s", url=str(path), remedy=f"kill -9 {pid}")
    except PermissionError as exn:
        raise DaemonError("the daemon belongs to another user", url=str(path), remedy="ask its administrator") from exn
    finally:
        os.close(process)
