"""`shardcache man`: man pages of all commands."""

from __future__ import annotations

from pathlib import Path

import click

from shardcache import __version__
from shardcache.cli.common import json_option, print_json
from shardcache.errors import ConfigError


@click.command(short_help="Write the man pages of all commands into a folder.")
@click.argument("folder", type=click.Path(path_type=Path, readable=False, file_okay=False))
@json_option
@click.pass_context
def man(ctx: click.Context, folder: Path, as_json: bool) -> None:
    """Write a man page for each command into FOLDER, which is created if it does not exist.

    For all users of this machine, as root: `shardcache man /usr/local/share/man/man1`. For one user:
    `shardcache man ~/.local/share/man/man1`. Then `man shardcache-serve` shows the page of `shardcache serve`.
    """
    from shardcache.cli.installation.manpages import pages

    root = ctx.find_root().command
    assert isinstance(root, click.Group)
    written = pages(root, "shardcache", __version__)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, page in written.items():
            (folder / name).write_text(page)
    except OSError as exn:
        raise ConfigError(
            f"cannot write man pages: {exn}", remedy="choose a folder that you may write to, or run it as root"
        ) from None
    if as_json:
        print_json({"pages": [str(folder / name) for name in written]})
    else:
        click.echo(f"{len(written)} pages written to {folder}")
