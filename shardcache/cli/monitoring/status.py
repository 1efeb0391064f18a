"""`shardcache status` and `shardcache top`: the daemon's status, once and live.

The daemon returns its status as a JSON object, the status page. `status_text` makes text of it, and
`top_screen` shows the text at an interval.
"""

from __future__ import annotations

from pathlib import Path

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient


@common.examples("status", "status --json")
@click.command()
@common.query_options
def status(as_json: bool, socket: Path | None) -> None:
    """Show the daemon's cache, counters, transfers and jobs."""
    page = AdminClient(socket).status()
    if as_json:
        common.print_json(page)
    else:
        from shardcache.cli.monitoring.status_frame import StatusFrame
        from shardcache.cli.monitoring.status_text import draw

        console = common.make_console()
        console.print(draw(StatusFrame(page), console.width))


@common.examples("top", "top --once --interval 5")
@click.command(context_settings={"show_default": True})
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1),
    default=1.0,
    help="Seconds between updates.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Show one frame, with the rates of one interval, and exit.",
)
@common.query_options
def top(interval_s: float, once: bool, as_json: bool, socket: Path | None) -> None:
    """Show the cache, jobs and transfers live.

    Press q or Ctrl-C to quit. If the output is not a terminal, prints one frame, as with --once.
    With --json, prints one line of JSON per interval: the status with its "rates", or an "error"
    while no daemon answers.
    """
    import asyncio

    from shardcache.cli.monitoring.top_screen import show_daemon

    asyncio.run(show_daemon(socket, interval_s, once=once, as_json=as_json))
