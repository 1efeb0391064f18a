"""`shardcache config`: the daemon's options, where each is set, and whether a config file is valid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.common import Family, json_option, print_json
from shardcache.cli.serve import SettingsCommand, config_option, given

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from shardcache.config import Settings, Sources

Json = dict[str, Any]


@click.group(cls=Family, short_help="Show the daemon's options and their sources, or check a config file.")
def config() -> None:
    """Show the options that a daemon started here would have, or check a config file."""


@config.command(cls=SettingsCommand, short_help="Show each option's value, and what sets it.")
@config_option
@json_option
def show(config: Path | None, as_json: bool, **flags: Any) -> None:
    """Show the value of each option of `serve`, and the flag, the variable or the line of the file that sets it.

    Takes the options of `serve`, and shows what they would lead to. Secrets are redacted: passwords in urls, and the
    values of storage_options.
    """
    from shardcache.config import Settings, Sources, config_file, unknown_variables

    options = given(flags)
    settings = Settings.load(options, config)
    path = config_file(config)
    rows = list(_rows(settings, Sources(options, os.environ, path)))
    unknown = [{"name": name, "meant": meant} for name, meant in unknown_variables()]
    if as_json:
        print_json({"file": str(path) if path.exists() else None, "options": rows, "unknown_variables": unknown})
    else:
        _print(rows, unknown)


def _rows(settings: Settings, sources: Sources) -> list[Json]:
    from shardcache.protocol import socket_path

    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    values["socket"] = socket_path(settings.socket)
    return [
        {"name": name, "value": _json(value), **_source(name, name in settings.model_fields_set, sources)}
        for name, value in values.items()
    ]


def _source(name: str, is_set: bool, sources: Sources) -> Json:
    if not is_set:
        return {"source": "default", "place": None}
    return {"source": sources.kind(name), "place": sources.place((name,))}


def _json(value: object) -> Any:
    """Return an option's value as JSON, without secrets; sizes in bytes, or as written if they are a share."""
    from pydantic import BaseModel

    from shardcache.config import AllowRule, Amount
    from shardcache.redact import redact

    match value:
        case Amount():
            return value.value_bytes if value.fraction is None else f"{value.fraction * 100:g}%"
        case AllowRule():
            return {"prefix": redact(value.prefix), "users": sorted(value.uids), "groups": sorted(value.gids)}
        case BaseModel():
            given = {name: getattr(value, name) for name in value.model_fields_set}
            return {
                name: _hidden(inner) if name == "storage_options" else _json(inner) for name, inner in given.items()
            }
        case tuple() | list():
            return [_json(inner) for inner in value]
        case Path():
            return str(value)
        case str():
            return redact(value)
    return value


def _hidden(value: object) -> Any:
    """Return storage options without their values: any may be a password or a key."""
    from shardcache.redact import HIDDEN

    if isinstance(value, dict):
        return {name: _hidden(inner) for name, inner in value.items()}
    return value if isinstance(value, bool) else HIDDEN


def _print(rows: list[Json], unknown: list[Json]) -> None:
    from rich.text import Text

    from shardcache.cli.output import make_console, make_table
    from shardcache.config import Settings

    console = make_console()
    table = make_table("option", "value", "source")
    for row in rows:
        field = Settings.model_fields[row["name"]]
        for number, value in enumerate(_texts(row["value"], field)):
            name, place = (row["name"].replace("_", "-"), row["place"] or "default") if number == 0 else ("", "")
            table.add_row(Text(name), Text(value), Text(place, "" if row["place"] else "dim"))
    console.print(table)
    for variable in unknown:
        meant = f"; did you mean {variable['meant']}?" if variable["meant"] else ""
        console.print(f"warning: nothing reads ${variable['name']}{meant}", markup=False)


def _texts(value: Any, field: FieldInfo) -> list[str]:
    """Return a value as people write it, one line per table."""
    from shardcache.units import size

    if value in (None, []):
        return [(field.description or "").partition("[default: ")[2].rstrip("]") or "none"]
    if isinstance(value, list):
        return [
            " ".join(f"{name}={inner}" for name, inner in each.items() if inner not in ([], None)) for each in value
        ]
    if isinstance(value, str):
        return [value]
    return [size(value) if "ByteSize" in str(field.annotation) or "Amount" in str(field.annotation) else f"{value:g}"]


@config.command(short_help="Check a config file.")
@click.argument("file", type=click.Path(path_type=Path, readable=False), required=False)
@json_option
def check(file: Path | None, as_json: bool) -> None:
    """Check that a config file is valid; exit 2 and name each invalid option and its line if it is not.

    Without FILE: $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml. Environment variables are ignored. For the
    effects of valid options on this node, run `shardcache doctor --config FILE`.
    """
    from shardcache.config import FileSettings, config_file

    path = config_file(file)
    settings = FileSettings.read(path)
    names = [name for name in type(settings).model_fields if name in settings.model_fields_set]
    if as_json:
        print_json({"file": str(path), "valid": True, "options": names})
    else:
        click.echo(f"{path}: valid; sets {', '.join(names) or 'nothing'}")
