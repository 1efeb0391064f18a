"""`shardcache probe`: is the daemon started, ready and alive?

The probes are those of Kubernetes: startup, readiness and liveness. The daemon reports its health
in one word: "ok"; "degraded", its disk has a problem; or "draining", it is stopping.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from shardcache.cli import common
from shardcache.errors import DaemonError, NoDaemonError
from shardcache.shared.socket_paths import socket_path
from shardcache.shared.unix_socket import health

# The health states in which each probe passes. No state depends on an origin.
PASSES = {
    # The daemon has started to serve.
    "startup": frozenset({"ok", "degraded"}),
    # The daemon's disk is healthy, and the daemon is not stopping.
    "ready": frozenset({"ok"}),
    # The daemon answers. Its disk may have a problem, which a restart would not fix.
    "live": frozenset({"ok", "degraded", "draining"}),
}
LIMIT_S = 5.0
# A disk that has not responded for this time hangs, and a restart of the daemon may help. (A full
# or broken disk still responds.) The value is that of server/process/service_notifier.py.
HUNG_S = 120.0
_SECONDS = click.FloatRange(min=0)
_PAUSE_S = 0.2


def ask(path: Path | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the health that the daemon reports.

    Raises NoDaemonError if nothing answers in time, DaemonError if this user may not ask, or
    another program answers.

    Args:
        path: path of the daemon's socket; None for the default socket.
        limit_s: time limit of each step of the exchange.
    """
    where = socket_path(path)
    try:
        return health(where, limit_s)
    except TimeoutError:
        raise NoDaemonError(f"no answer within {limit_s:g} s", url=str(where)) from None
    except PermissionError:
        raise DaemonError("this user may not use the daemon's socket", url=str(where)) from None
    except OSError as exn:
        raise NoDaemonError(f"no daemon answers: {exn.strerror or exn}", url=str(where)) from None
    except ValueError:
        raise DaemonError(
            "the server at the socket is not a shardcache daemon",
            url=str(where),
        ) from None


def passes(what: str, reported: dict[str, Any]) -> bool:
    """Return True if a daemon with this health passes the probe `what`, one of `PASSES`."""
    if reported["status"] not in PASSES[what]:
        return False
    is_disk_hung = reported.get("disk", {}).get("silent_s", 0.0) > HUNG_S
    fails_live = what == "live" and is_disk_hung
    return not fails_live


@common.examples("probe ready --wait-s 60", "probe live")
@click.command()
@click.argument("what", type=click.Choice(list(PASSES)))
@click.option(
    "--timeout-s",
    type=_SECONDS,
    default=LIMIT_S,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@click.option(
    "--wait-s",
    type=_SECONDS,
    default=0.0,
    help="Keep asking for this many seconds, until the probe passes.  [default: ask once]",
)
@common.query_options
def probe(what: str, timeout_s: float, wait_s: float, as_json: bool, socket: Path | None) -> None:
    """Exit 0 if the daemon passes the probe, 1 if it does not, 3 if no daemon answers.

    startup passes once the daemon has started to serve; ready, while its disk is healthy and it is
    not stopping; live, while it answers and its disk does not hang. No probe depends on an object
    store.
    """
    reported = _ask_until(what, socket, timeout_s, time.monotonic() + wait_s)
    if as_json:
        common.print_json(reported)
    else:
        click.echo(reported["status"])
    if not passes(what, reported):
        common.fail()


def _ask_until(
    what: str,
    socket: Path | None,
    timeout_s: float,
    deadline_s: float,
) -> dict[str, Any]:
    """Return the first answer that passes the probe, or else the answer at the deadline.

    At the deadline, raises as `ask` does.

    Args:
        what: the probe, a key of `PASSES`.
        socket: path of the daemon's socket; None for the default socket.
        timeout_s: time limit of each step of asking.
        deadline_s: time of the monotonic clock until which to keep asking.
    """
    while time.monotonic() < deadline_s:
        with suppress(NoDaemonError):
            reported = ask(socket, timeout_s)
            if passes(what, reported):
                return reported
        time.sleep(_PAUSE_S)  # the daemon is polled, since nothing signals its start
    return ask(socket, timeout_s)
