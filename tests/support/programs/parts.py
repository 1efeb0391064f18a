"""Common parts of programs that run in parts: which parts are asked for, and where they print."""

from __future__ import annotations

from collections.abc import Collection

import click
from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    found = Console(stderr=stderr)
    # Into a file or a pipe: nothing there has a width that lines must keep to.
    return found if found.is_terminal else Console(stderr=stderr, width=160)


def chosen(only: str, parts: Collection[str]) -> list[str]:
    """Return the parts that `--only` names, with commas between. Raises click.BadParameter."""
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise click.BadParameter(f"no part {', '.join(unknown)}; there are {', '.join(parts)}", param_hint="--only")
    return names
