"""The fields of `Settings` as options of commands, such as --cache-dir of `serve`.

The module `config.settings` takes time to import, so it is imported only when the options of such a
command are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from shardcache.cli import common

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class SettingsCommand(click.Command):
    """A command with one option for each field of `Settings` that the command line can express."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the declared parameters and those of `Settings`."""
        return [*settings_options(), *super().get_params(ctx)]


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML config file.  [default: $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml "
    "if it exists]",
)


@cache
def settings_options() -> tuple[click.Parameter, ...]:
    """Return the options of `Settings`. click asks for a command's parameters more than once."""
    from shardcache.config.settings import Settings

    fields = Settings.model_fields.items()
    return tuple(_option(name, field) for name, field in fields if _fits_flag(field))


def given_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Settings` that are on the command line.

    Args:
        flags: values of all options; None or () for an option that is not given.
    """
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _option(name: str, field: FieldInfo) -> click.Option:
    """Return the option for a field of `Settings`."""
    metavar = None
    # The value of most options is a text for click; pydantic parses it.
    kind: click.ParamType[Any] | type[str] = str
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
    """Return True if a flag can express the values of a field.

    Only the config file can express tables such as `[[origin]]`.
    """
    from pydantic import BaseModel

    kinds = [kind for kind in get_args(field.annotation) if isinstance(kind, type)]
    return not any(issubclass(kind, BaseModel) for kind in kinds)


def _metavar(field: FieldInfo) -> str:
    """Return the word that stands for a field's value in the help."""
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
