"""TCP sockets, connected to the first of a host's addresses to answer."""

import asyncio
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from shardcache.access.near import is_near

NEXT_ADDRESS_S = 0.25
"""Head start of each address over the next (RFC 8305, section 5)."""

# A dead peer is noticed within half a minute even if nothing is sent: three keepalive probes after
# 15 s; data that stays unacknowledged also ends the connection. A NAT or load balancer may drop an
# idle connection without notice to either end, and whatever is sent over it then is lost.
_OPTIONS = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms
}

# A lookup cannot be cancelled. If a name server is dead, its lookups keep their threads for long.
# Hence a pool of their own: neither other work nor the end of the process waits for them.
_LOOKUPS = ThreadPoolExecutor(16, thread_name_prefix="lookup")


class NearHostError(Exception):
    """A name that looks like another host's leads to this node or its cloud's metadata service."""


def new_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket for one of the addresses that `getaddrinfo` returned for a host."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # all of them on Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


async def connect(host: str, port: int, *, far_only: bool = False) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses to answer.

    The addresses that are checked are those connected to: a name whose addresses change in between
    (DNS rebinding) gains nothing.

    Args:
        far_only: True to refuse a host whose name leads to this node.

    Raises OSError that names the host, and with `far_only` NearHostError.
    """
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        addresses = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, lookup)
        if far_only:
            _check_far(host, addresses)
        return await aiohappyeyeballs.start_connection(
            addresses,
            happy_eyeballs_delay=NEXT_ADDRESS_S,
            interleave=1,
            socket_factory=new_socket,
        )
    except OSError as exn:
        raise ConnectionError(failure(exn, f"{host}:{port}")) from exn


def _check_far(host: str, addresses: Sequence[AddrInfoType]) -> None:
    """Raise NearHostError if a name that looks like another host's has a near address.

    A host that is near by its own name was permitted, or refused, with the url.
    """
    if is_near(host):
        return
    for *_, socket_address in addresses:
        ip = str(socket_address[0])
        if is_near(ip):
            raise NearHostError(
                f"{host} resolves to {ip}, which is this node or its cloud's metadata service",
            )


def failure(exn: OSError, place: str) -> str:
    """Return why there is no connection to a place."""
    if isinstance(exn, ConnectionRefusedError):
        return f"connection refused by {place}"
    reason = exn.strerror or str(exn)
    if exn.errno is not None and exn.errno > 0:  # negative for a name that is not known
        reason = os.strerror(exn.errno)
    return f"no connection to {place}: {reason}"
