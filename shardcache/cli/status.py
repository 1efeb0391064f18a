"""Commands that look at the daemon: `status`, `top` and `probe`."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from shardcache.cli import probing
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.common import fail, json_option, print_json, socket_option
from shardcache.errors import NoDaemonError

_SECONDS = click.FloatRange(min=0)
_PAUSE_S = 0.2


@click.command()
@json_option
@socket_option
def status(as_json: bool, socket: Path | None) -> None:
    """Show the daemon's cache, counters, transfers and jobs."""
    page = AdminClient(socket).status()
    if as_json:
        print_json(page)
    else:
        from shardcache.cli.output import make_console
        from shardcache.cli.page import Moment, draw

        console = make_console()
        console.print(draw(Moment(page), console.width))


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
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

    from shardcache.cli.live import show_node

    asyncio.run(show_node(interval_s, once, as_json, socket))


@click.command()
@click.argument("what", type=click.Choice(list(probing.PASSES)))
@click.option(
    "--timeout-s", type=_SECONDS, default=probing.LIMIT_S, show_default=True, help="Time limit for an answer."
)
@click.option(
    "--wait-s",
    type=_SECONDS,
    default=0.0,
    help="Keep asking for this long until the probe passes.  [default: ask once]",
)
@json_option
@socket_option
def probe(what: str, timeout_s: float, wait_s: float, as_json: bool, socket: Path | None) -> None:
    """Exit 0 if the daemon passes the probe WHAT, 1 if it does not, 3 if no daemon answers.

    startup: the daemon has started to serve. ready: its disk is healthy, and it is not stopping. live: it answers, and
    its disk does not hang. None of the probes depends on an object store.
    """
    health = _ask_until(what, socket, timeout_s, time.monotonic() + wait_s)
    if as_json:
        print_json(health)
    else:
        click.echo(health["status"])
    if not probing.passes(what, health):
        fail()


def _ask_until(what: str, socket: Path | None, timeout_s: float, deadline_s: float) -> dict[str, Any]:
    """Return the first answer that passes the probe, or the one at the deadline; then raises as `ask` does."""
    while time.monotonic() < deadline_s:
        with suppress(NoDaemonError):
            health = probing.ask(socket, timeout_s)
            if probing.passes(what, health):
                return health
        time.sleep(_PAUSE_S)  # polling: nothing signals a daemon's start
    return probing.ask(socket, timeout_s)
