"""`shardcache probe`: checks whether the daemon is started, ready or alive.

The probes are those of Kubernetes: startup, readiness and liveness. The daemon reports its health
in one word, its state: "ok"; "degraded", if its disk has a problem; or "draining", if it is
stopping.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from shardcache.cli import common
from shardcache.shared.exceptions import DaemonError, NoDaemonError
from shardcache.shared.socket_paths import socket_path
from shardcache.shared.unix_socket import health

# The states in which each probe passes. No state depends on an object store.
PASSING_STATES = {
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
_POLL_S = 0.2


def ask_health(path: Path | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the health that the daemon reports: its state as `status`, and facts on its `disk`.

    Raises NoDaemonError if nothing answers in time, DaemonError if this user may not ask, or
    another program answers.

    Args:
        path: path of the daemon's socket; None for the default socket.
        limit_s: time limit for connecting, for sending and for each read.
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


def passes(probe_name: str, reported: dict[str, Any]) -> bool:
    """Return True if a daemon with this health passes a probe, one of `PASSING_STATES`."""
    if reported["status"] not in PASSING_STATES[probe_name]:
        return False
    if probe_name != "live":
        return True
    disk = reported.get("disk", {})
    is_disk_hung: bool = disk.get("silent_s", 0.0) > HUNG_S
    return not is_disk_hung


@common.examples("probe ready --wait-s 60", "probe live")
@click.command()
@click.argument("probe_name", type=click.Choice(list(PASSING_STATES)))
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
def probe(
    probe_name: str,
    timeout_s: float,
    wait_s: float,
    as_json: bool,
    socket: Path | None,
) -> None:
    """Exit 0 if the daemon passes the probe, 1 if it does not, 3 if no daemon answers.

    startup passes once the daemon has started to serve; ready, while its disk is healthy and it is
    not stopping; live, while it answers and its disk does not hang. No probe depends on an object
    store.
    """
    reported = _ask_until(probe_name, socket, timeout_s, time.monotonic() + wait_s)
    if as_json:
        common.print_json(reported)
    else:
        click.echo(reported["status"])
    if not passes(probe_name, reported):
        common.fail()


def _ask_until(
    probe_name: str,
    socket: Path | None,
    timeout_s: float,
    deadline_s: float,
) -> dict[str, Any]:
    """Return the first answer that passes the probe, or else the answer at the deadline.

    At the deadline, raises as `ask_health` does.

    Args:
        probe_name: the probe, a key of `PASSING_STATES`.
        socket: path of the daemon's socket; None for the default socket.
        timeout_s: the `limit_s` of `ask_health`.
        deadline_s: time of the monotonic clock until which to keep asking.
    """
    while time.monotonic() < deadline_s:
        with suppress(NoDaemonError):
            reported = ask_health(socket, timeout_s)
            if passes(probe_name, reported):
                return reported
        time.sleep(_POLL_S)  # the daemon is polled, since nothing signals its start
    return ask_health(socket, timeout_s)
