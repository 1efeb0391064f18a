"""`shardcache status`: this node's cache, counters, transfers and jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from shardcache.cli.common import json_option, print_json, socket_option


@click.command()
@json_option
@socket_option
def status(as_json: bool, socket: Path | None) -> None:
    """Show the daemon's cache, counters, transfers and jobs."""
    page = asyncio.run(_fetch(socket))
    if as_json:
        print_json(page)
    else:
        from shardcache.cli.display.output import make_console
        from shardcache.cli.display.page import show_page

        show_page(make_console(), page)


async def _fetch(socket: Path | None) -> dict[str, Any]:
    from shardcache.cli.client import AdminClient

    async with AdminClient(socket) as daemon:
        return await daemon.status()
