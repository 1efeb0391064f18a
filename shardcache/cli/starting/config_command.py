"""The commands `config show` and `config check`: the daemon's options, and their sources.

The source of an option's value is a flag, a variable of the environment, a line of the config file,
or the default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli import common
from shardcache.cli.starting.settings_options import SettingsCommand, config_option, given_options
from shardcache.shared.protocol import Json
from shardcache.shared.socket_paths import socket_path
from shardcache.shared.units import size
from shardcache.shared.wording.redact import HIDDEN, redact

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from shardcache.config.option_sources import Sources
    from shardcache.config.settings import Settings


@common.examples("config show", "config check shardcache.toml")
@click.group(
    cls=common.OrderedGroup,
    short_help="Show the daemon's options and their sources, or check a config file.",
)
def config() -> None:
    """Show the options that a daemon started here would have, or check a config file."""


@common.examples("config show", "config show --capacity 80% --json")
@config.command(cls=SettingsCommand, short_help="Show each option's value, and what sets it.")
@config_option
@common.json_option
def show(config_path: Path | None, as_json: bool, **flags: Any) -> None:
    """Show the value of each option of `serve`, and the flag, the variable or the line of the file
    that sets it.

    Add options of `serve` to see their effect. Secrets are redacted: passwords in urls, and the
    values of storage_options.
    """
    from shardcache.config.option_sources import Sources
    from shardcache.config.settings import Settings, config_file, unknown_variables

    options = given_options(flags)
    settings = Settings.load(options, config_path)
    path = config_file(config_path)
    sources = Sources(options, os.environ, path)
    rows = list(_rows(settings, sources))
    unknown = [{"name": name, "meant": similar} for name, similar in unknown_variables()]
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
    """Yield each option as JSON: its name, its value, and the kind and the place of its source.

    The place is text, such as a line of the config file; None for a default.
    """
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if name == "socket":  # without a path, the daemon itself chooses one: show its choice
            value = socket_path(settings.socket)
        kind: str = "default"
        place: str | None = None
        if name in settings.model_fields_set:
            kind = sources.kind_of_source(name)
            place = sources.place((name,))  # a location of one element is the whole option
        yield {"name": name, "value": _json_value(value), "source": kind, "place": place}


def _json_value(value: object) -> Any:
    """Return an option's value as JSON, without secrets.

    A size is a number of bytes, or a percentage as text.
    """
    from pydantic import BaseModel

    from shardcache.access.rules import AllowRule
    from shardcache.config.amounts import DiskAmount

    match value:
        case DiskAmount():
            if value.fraction is None:
                return value.value_bytes
            return f"{value.fraction * 100:g}%"
        case AllowRule():
            return {
                "prefix": redact(value.prefix),
                "users": sorted(value.uids),
                "groups": sorted(value.gids),
            }
        case BaseModel():
            # Only the fields that are set are shown: most of a table's have their defaults.
            fields = {}
            for name in value.model_fields_set:
                to_json = _hidden if name == "storage_options" else _json_value
                fields[name] = to_json(getattr(value, name))
            return fields
        case tuple() | list():
            return [_json_value(inner) for inner in value]
        case Path():
            return str(value)
        case str():
            return redact(value)
    return value


def _hidden(value: object) -> Any:
    """Return storage options with their values hidden, since any may be a password or a key."""
    if isinstance(value, dict):
        return {name: _hidden(inner) for name, inner in value.items()}
    if isinstance(value, bool):
        return value
    return HIDDEN


def _print_options(rows: list[Json], unknown_variables: list[Json]) -> None:
    """Print a table of the options, and a warning for each variable that nothing reads."""
    from rich.text import Text

    from shardcache.config.settings import Settings

    console = common.make_console()
    table = common.make_table("option", "value", "source")
    for row in rows:
        field = Settings.model_fields[row["name"]]
        name = row["name"].replace("_", "-")
        place = Text(row["place"]) if row["place"] else Text("default", "dim")
        for line in _value_lines(row["value"], field):
            table.add_row(Text(name), Text(line), place)
            # Name and place are only in the first row of an option.
            name = ""
            place = Text()
    console.print(table)
    for variable in unknown_variables:
        advice = ""
        if variable["meant"]:
            advice = f"; did you mean {variable['meant']}?"
        console.print(f"warning: nothing reads ${variable['name']}{advice}", markup=False)


def _value_lines(value: Any, field: FieldInfo) -> list[str]:
    """Return an option's value as lines of text: one for each table of a list, or else one."""
    match value:
        case None | []:
            return [_default_in_words(field)]
        case list():
            return [_table_text(each) for each in value]
        case str():
            return [value]
    # All other values are numbers. The annotation may be a union or nested: its text is searched.
    is_size = re.search("ByteSize|DiskAmount", str(field.annotation)) is not None
    if is_size:
        return [size(value)]
    return [f"{value:g}"]


def _default_in_words(field: FieldInfo) -> str:
    """Return `off`, for one, of an option whose description ends with `[default: off]`."""
    match_ = re.search(r"\[default: (.*)\]$", field.description or "")
    return match_[1] if match_ else "none"


def _table_text(table: Json) -> str:
    """Return a table such as `[[origin]]` on one line, without its empty fields."""
    fields = [f"{name}={value}" for name, value in table.items() if value not in ([], None)]
    return " ".join(fields)


@common.examples("config check", "config check shardcache.toml")
@config.command(short_help="Check a config file.")
# `readable=False` leaves a file that cannot be read to `Settings.read`, whose error has a remedy.
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
