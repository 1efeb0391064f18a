"""`shardcache probe`: the daemon's health as an exit code, for whoever supervises it."""

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
@click.option("--timeout-s", type=_SECONDS, default=LIMIT_S, show_default=True, help="For an answer.")
@click.option("--wait-s", type=_SECONDS, default=0.0, help="Ask again for so long, until it is.  [default: ask once]")
@json_option
@socket_option
def probe(what: str, timeout_s: float, wait_s: float, as_json: bool, socket: Path | None) -> None:
    """Exit 0 when the daemon is as WHAT asks, 1 when it is not, 3 when none answers.

    startup: it has begun to serve. ready: its disk is well, and it is not stopping. live: it answers, and its disk does
    not hang. None of them depends on a store.
    """
    health = _ask_until(what, socket, timeout_s, time.monotonic() + wait_s)
    if as_json:
        print_json(health)
    else:
        click.echo(health["status"])
    if not passes(what, health):
        fail()


def _ask_until(what: str, socket: Path | None, timeout_s: float, deadline_s: float) -> dict[str, Any]:
    """Return the first answer with which the probe succeeds, or the one at the deadline; raises as `ask` does then."""
    while time.monotonic() < deadline_s:
        with suppress(NoDaemonError):
            health = ask(socket, timeout_s)
            if passes(what, health):
                return health
        time.sleep(_PAUSE_S)  # nobody tells of a daemon that is not there yet
    return ask(socket, timeout_s)
