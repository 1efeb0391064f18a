"""`shardcache top`: live view of this node's daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardcache.cli.commands.status import print_nodes
from shardcache.cli.common import json_option, nodes_options, socket_option

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
@nodes_options
@json_option
@socket_option
def top(
    interval_s: float,
    once: bool,
    nodes: tuple[str, ...],
    token_file: Path | None,
    as_json: bool,
    socket: Path | None,
) -> None:
    """Show the cache, jobs and transfers live.

    Press q or Ctrl-C to quit. If the output is not a terminal, prints one frame, as with --once. With --json, prints
    one line of JSON per interval: the status page and its "rates", or "error" while no daemon answers.

    With --nodes, shows a line for each of several nodes, and their totals; with --once, then exits 1 if a node does not
    answer, and 3 if none does.
    """
    import asyncio

    from shardcache.cli import top_views as live

    if nodes and (once or not (as_json or sys.stdout.isatty())):
        print_nodes(nodes, token_file, interval_s, as_json=as_json, with_rates=True)
    elif nodes:
        asyncio.run(live.show_nodes(nodes, token_file, interval_s, as_json))
    else:
        asyncio.run(live.show_node(interval_s, once, as_json, socket))
