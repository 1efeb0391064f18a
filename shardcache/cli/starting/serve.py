"""The commands `serve`, `stop`, `config show` and `config check`.

The daemon's options are the fields of `Settings`, which is imported only when it is needed.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.errors import ConfigError, DaemonError, NoDaemonError
from shardcache.redact import HIDDEN, redact
from shardcache.shared.private import PrivatePlace
from shardcache.shared.protocol import Json
from shardcache.shared.socket_paths import socket_path
from shardcache.shared.units import size
from shardcache.shared.unix_socket import connected, credentials

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from shardcache.config.option_sources import Sources
    from shardcache.config.settings import Settings


_ANSWER_S = 10.0  # limit for connecting to a daemon
_STOP_S = 60.0  # limit for its end after SIGTERM


class SettingsCommand(click.Command):
    """A command with one option for each field of `Settings` that the command line can express."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the declared parameters and those of `Settings`."""
        from shardcache.config.settings import Settings

        options: list[click.Parameter] = []
        for name, field in Settings.model_fields.items():
            if _fits_flag(field):
                options.append(_option(name, field))
        return options + super().get_params(ctx)


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML config file.  [default: $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml "
    "if it exists]",
)


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Settings` that are on the command line."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _option(name: str, field: FieldInfo) -> click.Option:
    """Return the option for a field of `Settings`."""
    metavar = None
    kind: click.ParamType[Any] | type[str] = str  # text, for pydantic to parse
    if get_origin(field.annotation) is Literal:
        kind = click.Choice(get_args(field.annotation))
    else:
        metavar = _metavar(field)
    return click.Option(
        ["--" + name.replace("_", "-"), name],
        type=kind,
        metavar=metavar,
        shell_complete=common.complete_path if metavar == "PATH" else None,
        multiple=get_origin(field.annotation) is tuple,
        help=_help(field),
    )


def _fits_flag(field: FieldInfo) -> bool:
    """Return False for tables such as `[[origin]]`, which only the config file can express."""
    from pydantic import BaseModel

    kinds = [kind for kind in get_args(field.annotation) if isinstance(kind, type)]
    return not any(issubclass(kind, BaseModel) for kind in kinds)


def _metavar(field: FieldInfo) -> str:
    kinds = get_args(field.annotation) or (field.annotation,)
    for kind, metavar in ((Path, "PATH"), (float, "SECONDS"), (bool, "BOOL")):
        if kind in kinds:
            return metavar
    names = {getattr(kind, "__name__", "") for kind in kinds}
    if names & {"DiskAmount", "ByteSize"}:
        return "SIZE"
    return "N" if int in kinds else "TEXT"


def _help(field: FieldInfo) -> str:
    """Return the help text of a field, with its default."""
    text = field.description or ""
    default = field.get_default(call_default_factory=True)
    text = text[:1].upper() + text[1:]
    if default in (None, ()):
        return text
    if hasattr(default, "human_readable"):
        default = default.human_readable()
    return f"{text}  [default: {default}]"


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
def serve(config: Path | None, *, private: bool, as_json: bool, **flags: Any) -> None:
    """Run this node's daemon until SIGTERM or Ctrl-C.

    The daemon needs a folder on a local disk, and credentials for the object store. It finds these
    in the usual places (environment, profile, instance role) or in an [[origin]] table of the
    config file.
    """
    options = given(flags)
    if not private:
        from shardcache.config.settings import Settings
        from shardcache.daemon.running import serve as run_daemon

        run_daemon(Settings.load(options, config))
        return
    from shardcache.cli.starting.private_daemon import start

    if "socket" in options:
        raise ConfigError(
            "a private daemon chooses its own socket, where your processes find it",
            remedy="omit --socket",
        )
    place = start(options, config)
    if as_json:
        common.print_json(place)
    else:
        state = "ready" if place["started"] else "runs already"
        click.echo(f"{state}: {place['socket']}; to stop it: shardcache stop")


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
    private = PrivatePlace.find().running()
    sockets = private if socket is None else [socket]
    if not sockets:
        raise NoDaemonError(
            "you have no private daemon running here",
            remedy="to stop another daemon, pass its --socket",
        )
    stopped = []
    for path in sockets:
        page = AdminClient(path).status()
        warning = _attached(page, is_private=path in private)
        if warning:
            click.echo(f"{path}: {warning}", err=True)
        is_asked = bool(warning) and not (yes or as_json) and sys.stdin.isatty()
        if is_asked and not click.confirm("Stop it?", err=True):
            continue
        _stop(path, page["pid"])
        stopped.append(path)
        if not as_json:
            click.echo(f"stopped: {path}")
    if as_json:
        common.print_json({"stopped": list(map(str, stopped))})
    if len(stopped) < len(sockets):
        common.fail()


def _attached(page: Json, *, is_private: bool) -> str:
    """Return what the readers of a daemon do once it has ended; empty if there are none."""
    readers = sum(job["sessions"] for job in page["jobs"])
    if not readers:
        return ""
    attached = f"{common.count(readers, 'reader')} attached"
    they = "it" if readers == 1 else "they"
    if is_private:
        return f"{attached}; {they} will start another"
    return f"{attached}; {they} will wait for the next one"


def _stop(path: Path, reported_pid: int) -> None:
    """Send SIGTERM to the daemon that listens at a socket, and wait for its end.

    Args:
        reported_pid: as the daemon's status has it.
    """
    with connected(path, _ANSWER_S) as sock:
        pid, _, _ = credentials(sock)
    if pid != reported_pid:
        # The socket is a service manager's, or the daemon runs in another PID namespace.
        raise DaemonError(
            "the daemon's socket was opened by another process",
            url=str(path),
            remedy="stop the daemon where it was started: by its service manager, or in its "
            "container",
        )
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        ended, _, _ = select.select([process], [], [], _STOP_S)
        if not ended:
            raise DaemonError(
                f"the daemon did not stop within {_STOP_S:g} s",
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
        os.close(process)


# Options and where they are set


@common.examples("config show", "config check shardcache.toml")
@click.group(
    cls=common.Family,
    short_help="Show the daemon's options and their sources, or check a config file.",
)
def config() -> None:
    """Show the options that a daemon started here would have, or check a config file."""


@common.examples("config show", "config show --capacity 80% --json")
@config.command(cls=SettingsCommand, short_help="Show each option's value, and what sets it.")
@config_option
@common.json_option
def show(config: Path | None, as_json: bool, **flags: Any) -> None:
    """Show the value of each option of `serve`, and the flag, the variable or the line of the file
    that sets it.

    Add options of `serve` to see their effect. Secrets are redacted: passwords in urls, and the
    values of storage_options.
    """
    from shardcache.config.option_sources import Sources
    from shardcache.config.settings import Settings, config_file, unknown_variables

    options = given(flags)
    settings = Settings.load(options, config)
    path = config_file(config)
    rows = list(_rows(settings, Sources(options, os.environ, path)))
    unknown = [{"name": name, "meant": meant} for name, meant in unknown_variables()]
    if as_json:
        common.print_json(
            {
                "file": str(path) if path.exists() else None,
                "options": rows,
                "unknown_variables": unknown,
            }
        )
    else:
        _print_options(rows, unknown)


def _rows(settings: Settings, sources: Sources) -> Iterator[Json]:
    """Yield name, value, kind of source and place of each option, as JSON."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if name == "socket":
            value = socket_path(settings.socket)
        kind: str = "default"
        place: str | None = None
        if name in settings.model_fields_set:
            kind = sources.kind(name)
            place = sources.place((name,))
        yield {"name": name, "value": _json(value), "source": kind, "place": place}


def _json(value: object) -> Any:
    """Return an option's value as JSON, without secrets.

    Sizes in bytes, or as written if they are a share.
    """
    from pydantic import BaseModel

    from shardcache.access.rules import AllowRule
    from shardcache.config.amounts import DiskAmount

    match value:
        case DiskAmount():
            return value.value_bytes if value.fraction is None else f"{value.fraction * 100:g}%"
        case AllowRule():
            return {
                "prefix": redact(value.prefix),
                "users": sorted(value.uids),
                "groups": sorted(value.gids),
            }
        case BaseModel():
            rows = {}
            for name in value.model_fields_set:
                inner = getattr(value, name)
                rows[name] = _hidden(inner) if name == "storage_options" else _json(inner)
            return rows
        case tuple() | list():
            return [_json(inner) for inner in value]
        case Path():
            return str(value)
        case str():
            return redact(value)
    return value


def _hidden(value: object) -> Any:
    """Return storage options without their values: any may be a password or a key."""
    if isinstance(value, dict):
        return {name: _hidden(inner) for name, inner in value.items()}
    return value if isinstance(value, bool) else HIDDEN


def _print_options(rows: list[Json], unknown: list[Json]) -> None:
    from rich.text import Text

    from shardcache.config.settings import Settings

    console = common.make_console()
    table = common.make_table("option", "value", "source")
    for row in rows:
        field = Settings.model_fields[row["name"]]
        name = row["name"].replace("_", "-")
        place = row["place"] or "default"
        for value in _texts(row["value"], field):
            table.add_row(Text(name), Text(value), Text(place, "" if row["place"] else "dim"))
            # Only in the first row of an option.
            name = ""
            place = ""
    console.print(table)
    for variable in unknown:
        meant = f"; did you mean {variable['meant']}?" if variable["meant"] else ""
        console.print(f"warning: nothing reads ${variable['name']}{meant}", markup=False)


def _texts(value: Any, field: FieldInfo) -> list[str]:
    """Return a value as people write it, one line per table."""
    match value:
        case None | []:
            # Such options describe in words what the daemon does without a value.
            _, _, default = (field.description or "").partition("[default: ")
            return [default.rstrip("]") or "none"]
        case list():
            return [_table_text(each) for each in value]
        case str():
            return [value]
    if re.search("ByteSize|DiskAmount", str(field.annotation)):
        return [size(value)]
    return [f"{value:g}"]


def _table_text(table: Json) -> str:
    facts = [f"{name}={value}" for name, value in table.items() if value not in ([], None)]
    return " ".join(facts)


@common.examples("config check", "config check shardcache.toml")
@config.command(short_help="Check a config file.")
@click.argument("file", type=click.Path(path_type=Path, readable=False), required=False)
@common.json_option
def check(file: Path | None, as_json: bool) -> None:
    """Check a config file; if it is invalid, exit 2 and name each invalid option and its line.

    Without FILE, checks $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml. Environment
    variables are ignored. To see what valid options do on this node, run `shardcache doctor
    --config FILE`.
    """
    from shardcache.config.settings import Settings, config_file

    path = config_file(file)
    settings = Settings.read(path)
    names = [name for name in type(settings).model_fields if name in settings.model_fields_set]
    if as_json:
        common.print_json({"file": str(path), "valid": True, "options": names})
    else:
        click.echo(f"{path}: valid; sets {', '.join(names) or 'nothing'}")
