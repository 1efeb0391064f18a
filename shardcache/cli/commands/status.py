"""`shardcache status`: the cache, counters, transfers and jobs of this node."""

from __future__ import annotations

from pathlib import Path

import click

from shardcache.cli.common import ask, json_option, print_json, socket_option


@click.command()
@json_option
@socket_option
def status(as_json: bool, socket: Path | None) -> None:
    """Show the daemon's cache, counters, transfers and jobs."""
    page = ask(socket, lambda daemon: daemon.status())
    if as_json:
        print_json(page)
    else:
        from shardcache.cli.display.output import make_console
        from shardcache.cli.display.page import show_page

        show_page(make_console(), page)
