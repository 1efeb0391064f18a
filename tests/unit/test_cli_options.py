"""The options of `serve` and what the README says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from pydantic.fields import FieldInfo

from shardcache.cli.commands.serve import serve
from shardcache.config import Settings

README = Path(__file__).parents[2] / "README.md"
FLAGS = [name for name in Settings.model_fields if name != "origin"]


def flag(name: str) -> str:
    """Return the option of a field."""
    return "--" + name.replace("_", "-")


def readme_row(name: str, field: FieldInfo) -> str:
    """Return the line of the README's table that is true of a field."""
    text = (field.description or "").partition(" [default: ")
    default = text[2].rstrip("]") or _shown(field.get_default(call_default_factory=False))
    if name == "cache_dir":
        default = "`/var/cache/shardcache` for root, `~/.cache/shardcache` for others"
    return f"| `{flag(name)}` | {default} | {text[0]} |"


def _shown(default: Any) -> str:
    return f"`{default.human_readable() if hasattr(default, 'human_readable') else default}`"


@pytest.mark.parametrize("name", FLAGS)
def test_readme_has_every_option(name: str) -> None:
    """The README's table tells each option's flag, default and description as Settings does."""
    assert readme_row(name, Settings.model_fields[name]) in README.read_text().splitlines()


def test_serve_has_a_flag_for_each_setting() -> None:
    """A field of Settings needs no second declaration to become a flag; tables stay in the config file."""
    # click keeps the first help option that it makes, and for other tests that was also -h.
    flags = {param.opts[0] for param in serve.get_params(click.Context(serve)) if "--help" not in param.opts}
    assert flags == {"--config", *map(flag, FLAGS)}


def test_every_setting_is_described() -> None:
    """Help and README have something to say about each option."""
    assert all(field.description for field in Settings.model_fields.values())
