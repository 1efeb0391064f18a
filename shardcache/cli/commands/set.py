"""`shardcache set`: settings of a running daemon."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from shardcache.cli.common import ask, json_option, print_json, socket_option
from shardcache.errors import ConfigError

_VALUES = {"capacity": (), "max-bandwidth": ("none",), "log-level": ("debug", "info", "warning", "error")}


def _complete_name(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return _starting(typed, _VALUES)


def _complete_value(ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return _starting(typed, _VALUES.get(str(ctx.params.get("name")), ()))


def _starting(typed: str, known: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(text) for text in known if text.startswith(typed)]


@click.command(name="set")
@click.argument("name", default="", shell_complete=_complete_name)
@click.argument("value", default="", shell_complete=_complete_value)
@json_option
@socket_option
def set_(name: str, value: str, as_json: bool, socket: Path | None) -> None:
    """Change a setting of the running daemon: capacity, max-bandwidth or log-level; without NAME, show them.

    VALUE is written as for the flag of `serve`; `none` removes the limit of max-bandwidth. A smaller capacity evicts
    shards down to it, and is refused if the leased and pinned shards would not fit. Changes last until the daemon
    stops; only root and the daemon's own user may make them.
    """
    if name and not value:
        raise ConfigError(f"no value for {name}", remedy=f"shardcache set {name} VALUE")
    if name:
        row = ask(socket, lambda daemon: daemon.set(name.replace("-", "_"), value))
        if as_json:
            print_json(row)
        else:
            _show_change(row, value)
    else:
        rows = ask(socket, lambda daemon: daemon.settings())
        if as_json:
            for row in rows:
                print_json(row)
        else:
            _show_settings(rows)


def _show_settings(rows: list[dict[str, Any]]) -> None:
    from shardcache.cli.display.output import make_console, make_table

    table = make_table("setting", "value", "description")
    for row in rows:
        table.add_row(_flag(row["name"]), _shown(row, "value"), row["description"].partition(" [default")[0])
    make_console().print(table)


def _show_change(row: dict[str, Any], value: str) -> None:
    from shardcache.cli.display.output import make_console
    from shardcache.units import size

    console, flag = make_console(), _flag(row["name"])
    console.print(f"{flag}: {_shown(row, 'former')} → {_shown(row, 'value')}", markup=False)
    if row.get("warning"):
        console.print(f"warning: {row['warning']}", markup=False)
    if row.get("freed_bytes"):
        console.print(f"{size(row['freed_bytes'])} evicted", markup=False)
    lasting = f"start the daemon with --{flag} {value}, or set it in the config file"
    lasting = lasting if row["value"] is not None else f"start the daemon without --{flag}"
    console.print(f"until the daemon stops; permanently: {lasting}", markup=False)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _shown(row: dict[str, Any], key: str) -> str:
    from shardcache.units import size

    value, rate = row[key], "/s" if row["name"] == "max_bandwidth" else ""
    return "no limit" if value is None else f"{size(value)}{rate}" if isinstance(value, int) else value
