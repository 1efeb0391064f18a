"""The options of `serve`."""

from __future__ import annotations

import click

from shardcache.cli.serve import serve
from shardcache.config import Settings

FLAGS = [name for name in Settings.model_fields if name != "origin"]


def flag(name: str) -> str:
    """Return the option of a field."""
    return "--" + name.replace("_", "-")


def test_serve_has_a_flag_for_each_setting() -> None:
    """A field of Settings needs no second declaration to become a flag; tables stay in the config file."""
    # click keeps the first help option that it makes, and for other tests that was also -h.
    flags = {param.opts[0] for param in serve.get_params(click.Context(serve)) if "--help" not in param.opts}
    assert flags == {"--config", "--private", "--json", *map(flag, FLAGS)}


def test_every_setting_is_described() -> None:
    """Help and the settings page have something to say about each option."""
    assert all(field.description for field in Settings.model_fields.values())
