"""`shardcache serve`: its options are the fields of `Settings`, imported only when needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from shardcache.cli.common import complete_path

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


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
def serve(config: Path | None, **flags: Any) -> None:
    """Run this node's daemon until SIGTERM or Ctrl-C.

    Needs a folder on a local disk, and credentials for the object store: from the usual chain (environment, profile,
    instance role) or from an [[origin]] table of the config file.
    """
    from shardcache.config import Settings
    from shardcache.daemon import serve as run_daemon

    run_daemon(Settings.load(given(flags), config))
