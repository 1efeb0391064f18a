"""Health probe of this node's nginx.

`python -m shardcache.cluster.nginx_probe [SOCKET]` exits 0 if nginx answers at the socket. It also
exits 0 while `shardcache cluster run --wait` waits to start nginx: for instance, until the list of
nodes has this node.

The probe runs every few seconds in a container, so it imports only the standard library.
"""

import sys
from pathlib import Path

from shardcache.shared.front import FRONT, PEERS, WAITING_NOTE, page

_LIMIT_S = 5.0
_FAILED = 1
_USAGE = 2


def describe_nginx(front: str, limit_s: float = _LIMIT_S) -> str:
    """Return a line about nginx: its node's name, the number of nodes, and their list's digest.

    Args:
        front: path of the socket at which nginx serves this node.
        limit_s: time limit of each step, such as connecting.

    Raises OSError if nothing answers, ValueError if another program than the tier's nginx answers.
    """
    match page(front, PEERS, limit_s):
        case {"node": node, "peers": peers, "digest": digest}:
            return f"{node}: {peers} nodes, digest {digest}"
    raise ValueError("not this tier")


def _reason_to_wait(front: str) -> str:
    """Return the reason why `shardcache cluster run --wait` has not started nginx; "" if none."""
    try:
        return Path(front).with_name(WAITING_NOTE).read_text()
    except OSError:
        return ""


def main(args: list[str]) -> int:
    """Run the probe: print the result, and return the exit code."""
    if len(args) > 1:
        print("usage: python -m shardcache.cluster.nginx_probe [SOCKET]", file=sys.stderr)
        return _USAGE
    front = args[0] if args else FRONT
    try:
        print(describe_nginx(front))
    except (OSError, ValueError) as exn:
        reason = _reason_to_wait(front)
        if reason:
            print(f"waiting: {reason}")
            return 0
        print(f"{front}: {exn or type(exn).__name__}", file=sys.stderr)
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
