"""Ports for servers that cannot choose their own."""

import random
import socket

# Below the range from which the kernel takes ports of outgoing connections, which may do so at any
# moment.
_PORTS = range(12_000, 22_000)

_held: list[socket.socket] = []


def free_port(also_above: int = 0) -> int:
    """Return a port of the loopback that is free, as is the one `also_above` higher.

    No other call returns it while this process lives, in this process or in others: tests run in
    several at once. Raises RuntimeError where none is left.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if _is_free(port) and _is_free(port + also_above) and _claim(port):
            return port
    raise RuntimeError(f"no free port from {_PORTS.start} to {_PORTS.stop}")


def _claim(port: int) -> bool:
    # A name that only one socket of the machine can have, and that the kernel takes back when its
    # process ends.
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0shardcache-tests-port-{port}")
    except OSError:
        claim.close()
        return False
    _held.append(claim)
    return True


def _is_free(port: int) -> bool:
    try:
        # On every address: clusters have several of the loopback.
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False
