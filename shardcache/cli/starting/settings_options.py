"""The fields of `Settings` as options of commands, such as --cache-dir of `serve`.

The module `config.settings` takes long to import, so it is imported only when a command with these
options is used.
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
    """A command with an option for each field of `Settings` whose values a flag can express."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the declared parameters and those of `Settings`."""
        return [*settings_options(), *super().get_params(ctx)]


config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, readable=False),
    help="TOML config file.  [default: $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml "
    "if it exists]",
)


@cache
def settings_options() -> tuple[click.Parameter, ...]:
    """Return the options of `Settings`.

    They are cached because click asks for a command's parameters more than once.
    """
    from shardcache.config.settings import Settings

    fields = Settings.model_fields.items()
    return tuple(_option(name, field) for name, field in fields if _fits_flag(field))


def given_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Settings` that are on the command line, by name.

    Args:
        flags: values of all options, by name; None or () for an option that is not given.
    """
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _option(name: str, field: FieldInfo) -> click.Option:
    """Return the option for a field of `Settings`."""
    value_type: click.ParamType[Any] | type[str]
    if get_origin(field.annotation) is Literal:
        value_type = click.Choice(get_args(field.annotation))
        metavar = None  # click lists the choices
    else:
        value_type = str  # pydantic parses the text
        metavar = _metavar(field)
    return click.Option(
        ["--" + name.replace("_", "-"), name],
        type=value_type,
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

    value_types = [each for each in get_args(field.annotation) if isinstance(each, type)]
    return not any(issubclass(each, BaseModel) for each in value_types)


def _metavar(field: FieldInfo) -> str:
    """Return the word that stands for a field's value in the help."""
    # The types of a union, such as `Path | None`, or else the only type.
    value_types = get_args(field.annotation) or (field.annotation,)
    for value_type, metavar in ((Path, "PATH"), (float, "SECONDS"), (bool, "BOOL"), (int, "N")):
        if value_type in value_types:
            return metavar
    names = {getattr(each, "__name__", "") for each in value_types}
    if names & {"DiskAmount", "ByteSize"}:
        return "SIZE"
    return "TEXT"


def _help(field: FieldInfo) -> str:
    """Return the help text of a field, with its default."""
    text = field.description or ""
    default = field.get_default(call_default_factory=True)
    text = text[:1].upper() + text[1:]
    if default in (None, ()):
        return text
    if hasattr(default, "human_readable"):  # a ByteSize of pydantic
        default = default.human_readable()
    return f"{text}  [default: {default}]"
