"""Health probes, with only the standard library: they run on every node every few seconds.

`python -m shardcache.cli.probing live` is `shardcache probe live` at the default socket, in half the time.
"""

import sys
from pathlib import Path
from typing import Any

from shardcache.errors import DaemonError, NoDaemonError
from shardcache.protocol import socket_path
from shardcache.unix_socket import health

# The health states in which each probe passes. None depends on an origin.
PASSES = {
    "startup": frozenset({"ok", "degraded"}),  # the daemon has started to serve
    "ready": frozenset({"ok"}),  # it is fully functional: its disk is healthy, and it is not stopping
    "live": frozenset({"ok", "degraded", "draining"}),  # it answers; a restart would fix neither disk nor origin
}
LIMIT_S = 5.0
# A full or broken disk still responds; a restart may help only with one that hangs. As in server/lifecycle.py.
HUNG_S = 120.0

_FAILED, _USAGE, _NO_DAEMON = 1, 2, 3


def ask(path: Path | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the health that the daemon reports; `limit_s` limits each step of the exchange.

    Raises NoDaemonError if nothing answers in that time, DaemonError if this user may not ask or something else
    answers.
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
        raise DaemonError("the server at the socket is not a shardcache daemon", url=str(where)) from None


def passes(what: str, found: dict[str, Any]) -> bool:
    """Return True if a daemon of this health passes the probe."""
    hangs = what == "live" and found.get("disk", {}).get("silent_s", 0.0) > HUNG_S
    return found["status"] in PASSES[what] and not hangs


def main(args: list[str]) -> int:
    """Run one probe; print the daemon's status and return the exit code."""
    if len(args) != 1 or args[0] not in PASSES:
        print(f"usage: python -m shardcache.cli.probing {'|'.join(PASSES)}", file=sys.stderr)
        return _USAGE
    try:
        found = ask()
    except DaemonError as exn:
        print(exn, file=sys.stderr)
        return _NO_DAEMON if isinstance(exn, NoDaemonError) else _FAILED
    print(found["status"])
    return 0 if passes(args[0], found) else _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
