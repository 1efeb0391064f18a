"""Options that name a member of samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from shardcache.errors import ConfigError


def member_type(kind: str) -> Callable[[str], Any]:
    """Return the parser of an option: of a TokenMember or a MetadataMember, as `kind` says."""

    def parse(text: str) -> Any:
        from shardcache.tarindex import contents

        try:
            return getattr(contents, kind).parse(text)
        except ConfigError as exn:
            raise click.BadParameter(f"{exn.message}; {exn.remedy}") from exn

    return parse


tokens_option = partial(
    click.option,
    "--tokens",
    metavar="EXT[:DTYPE]",
    type=member_type("TokenMember"),
)
"""The option `--tokens`, without its help."""
