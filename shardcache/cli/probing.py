"""Health probes, with only the standard library: they run on every node every few seconds.

`python -m shardcache.cli.probing live` is `shardcache probe live` at the default socket, in half the time.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from shardcache.errors import DaemonError, NoDaemonError
from shardcache.protocol import socket_path

# The health states in which each probe passes. None depends on an origin.
PASSES = {
    "startup": frozenset({"ok", "degraded"}),  # the daemon has started to serve
    "ready": frozenset({"ok"}),  # it is fully functional: its disk is healthy, and it is not stopping
    "live": frozenset({"ok", "degraded", "draining"}),  # it answers; a restart would fix neither disk nor origin
}
LIMIT_S = 5.0
# A full or broken disk still responds; a restart may help only with one that hangs. As in server/process/liveness.py.
HUNG_S = 120.0

_REQUEST = b"GET /v1/health HTTP/1.0\r\nHost: shardcache\r\n\r\n"
_FAILED, _USAGE, _NO_DAEMON = 1, 2, 3


def ask(path: Path | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the health that the daemon reports.

    Args:
        path: the daemon's socket; None for the default one.
        limit_s: time limit for each step of the exchange.

    Raises NoDaemonError if nothing answers in that time, DaemonError if this user may not ask or something else
    answers.
    """
    where = socket_path(path)
    try:
        answer = _exchange(where, limit_s)
    except TimeoutError:
        raise NoDaemonError(f"no answer within {limit_s:g} s", url=str(where)) from None
    except PermissionError:
        raise DaemonError("this user may not use the daemon's socket", url=str(where)) from None
    except OSError as exn:
        raise NoDaemonError(f"no daemon answers: {exn.strerror or exn}", url=str(where)) from None
    try:
        health: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
        return health | {"status": str(health["status"])}
    except (ValueError, KeyError, TypeError):
        raise DaemonError("the server at the socket is not a shardcache daemon", url=str(where)) from None


def passes(what: str, health: dict[str, Any]) -> bool:
    """Return True if a daemon of this health passes the probe."""
    hangs = what == "live" and health.get("disk", {}).get("silent_s", 0.0) > HUNG_S
    return health["status"] in PASSES[what] and not hangs


def _exchange(path: Path, limit_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(limit_s)
        sock.connect(str(path))
        sock.sendall(_REQUEST)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def main(args: list[str]) -> int:
    """Run one probe; print the daemon's status and return the exit code."""
    if len(args) != 1 or args[0] not in PASSES:
        print(f"usage: python -m shardcache.cli.probing {'|'.join(PASSES)}", file=sys.stderr)
        return _USAGE
    try:
        health = ask()
    except DaemonError as exn:
        print(exn, file=sys.stderr)
        return _NO_DAEMON if isinstance(exn, NoDaemonError) else _FAILED
    print(health["status"])
    return 0 if passes(args[0], health) else _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
