"""Options that name a member of samples: --tokens of `write` and `index`, --metadata of `index`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from shardcache.shared.exceptions import ConfigError

if TYPE_CHECKING:
    from shardcache.shared.tarindex.named_members import MetadataMember, TokenMember


def parse_token_member(text: str) -> TokenMember:
    """Parse the value of --tokens. Raises click.BadParameter."""
    from shardcache.shared.tarindex.named_members import TokenMember

    with _as_usage_errors():
        return TokenMember.parse(text)


def parse_metadata_member(text: str) -> MetadataMember:
    """Parse the value of --metadata. Raises click.BadParameter."""
    from shardcache.shared.tarindex.named_members import MetadataMember

    with _as_usage_errors():
        return MetadataMember.parse(text)


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    """Turn a ConfigError about an option's value into click.BadParameter."""
    try:
        yield
    except ConfigError as exn:
        raise click.BadParameter(f"{exn.message}; {exn.remedy}") from exn


tokens_option = partial(
    click.option,
    "--tokens",
    metavar="EXT[:DTYPE]",
    type=parse_token_member,
)
"""The option `--tokens`, to which each command adds its own help text."""
