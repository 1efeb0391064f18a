"""Health probe of this node's nginx, with only the standard library: it runs every few seconds in a container.

`python -m shardcache.cluster.nginx_probe 127.0.0.1:9080` exits 0 if the front at that address answers.
"""

import http.client
import json
import sys
from contextlib import closing

PEERS = "/.shardcache/peers"
STATUS = "/.shardcache/status"
_LIMIT_S = 5.0
_FAILED, _USAGE = 1, 2


def answer_of(front: str, limit_s: float = _LIMIT_S) -> str:
    """Return the node and the digest of the list that nginx has at HOST:PORT; `limit_s` limits each step.

    Raises OSError if nothing answers, and ValueError if something else does.
    """
    with closing(http.client.HTTPConnection(front, timeout=limit_s)) as connection:
        connection.request("GET", PEERS)
        answer = connection.getresponse()
        body = answer.read()
    try:
        found = json.loads(body)
        return f"{found['node']}: {found['peers']} nodes, digest {found['digest']}"
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"status {answer.status}: not this tier") from None


def main(args: list[str]) -> int:
    """Run the probe; print what it found and return the exit code."""
    if len(args) != 1:
        print("usage: python -m shardcache.cluster.nginx_probe HOST:PORT", file=sys.stderr)
        return _USAGE
    try:
        print(answer_of(args[0]))
    except (OSError, ValueError, http.client.HTTPException) as exn:
        print(f"{args[0]}: {exn or type(exn).__name__}", file=sys.stderr)
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
