"""`shardcache top`: live view of this node's daemon."""

from __future__ import annotations

from pathlib import Path

import click

from shardcache.cli.common import json_option, socket_option

_SHORTEST_INTERVAL_S = 0.1


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=_SHORTEST_INTERVAL_S),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates.",
)
@click.option("--once", is_flag=True, help="Show one frame, with the rates of one interval, and exit.")
@json_option
@socket_option
def top(interval_s: float, once: bool, as_json: bool, socket: Path | None) -> None:
    """Show the cache, jobs and transfers live.

    Press q or Ctrl-C to quit. If the output is not a terminal, prints one frame, as with --once. With --json, prints
    one line of JSON per interval: the status page and its "rates", or "error" while no daemon answers.
    """
    import asyncio

    from shardcache.cli.top_views import show_node

    asyncio.run(show_node(interval_s, once, as_json, socket))
