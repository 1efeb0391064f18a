"""`shardcache probe`: the daemon's health as an exit code, for supervisors."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from shardcache.cli.common import fail, json_option, print_json, socket_option
from shardcache.cli.probing import LIMIT_S, PASSES, ask, passes
from shardcache.errors import NoDaemonError

_SECONDS = click.FloatRange(min=0)
_PAUSE_S = 0.2


@click.command()
@click.argument("what", type=click.Choice(list(PASSES)))
@click.option("--timeout-s", type=_SECONDS, default=LIMIT_S, show_default=True, help="Time limit for an answer.")
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
    if not passes(what, health):
        fail()


def _ask_until(what: str, socket: Path | None, timeout_s: float, deadline_s: float) -> dict[str, Any]:
    """Return the first answer that passes the probe, or the one at the deadline; then raises as `ask` does."""
    while time.monotonic() < deadline_s:
        with suppress(NoDaemonError):
            health = ask(socket, timeout_s)
            if passes(what, health):
                return health
        time.sleep(_PAUSE_S)  # polling: nothing signals a daemon's start
    return ask(socket, timeout_s)
