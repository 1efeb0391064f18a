"""TCP sockets, connected to the first of a host's addresses to answer.

`opening` calls `connect` for each new connection to a server or a proxy. A host is near if it is
this node or its cloud's metadata service, which hands out credentials. A url that a user can choose
must not lead to a near host under the name of another host.
"""

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

# A dead peer is noticed within half a minute even if nothing is sent: after 15 s of silence, the
# kernel sends three keepalive probes. Sent data that stays unacknowledged for 15 s also ends the
# connection. These options are needed because a NAT or load balancer may drop an idle connection
# without notice to either end, and then loses whatever is sent over it.
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms
}

# Threads that look up hosts' names. A lookup cannot be cancelled, and if a name server is dead, it
# keeps its thread for a long time. Neither other work nor the end of the process waits for these
# threads, as they are in a pool of their own.
_LOOKUPS = ThreadPoolExecutor(16, thread_name_prefix="lookup")


class NearHostError(Exception):
    """A name that looks like another host's leads to this node or its cloud's metadata service.

    The error is not raised for a host that names this node openly, such as localhost or 127.0.0.1.
    """


def new_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket for one of the addresses that `getaddrinfo` returned for a host."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):  # Linux has all of them, other systems only some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


async def connect(host: str, port: int, *, far_only: bool = False) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses to answer.

    Args:
        far_only: True to refuse a host whose name leads to this node or its metadata service. The
            name is looked up once, for the check and for the connection. So a server of names that
            answers differently the next time (DNS rebinding) gains nothing.

    Raises an OSError that names the host, and NearHostError with `far_only`.
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
        raise ConnectionError(connection_failure(exn, f"{host}:{port}")) from exn


def _check_far(host: str, addresses: Sequence[AddrInfoType]) -> None:
    """Raise NearHostError if one of the host's addresses is near, though its name is not."""
    # A host that names this node openly is not refused here: the rules on urls have permitted it.
    if is_near(host):
        return
    for *_, socket_address in addresses:
        ip = str(socket_address[0])
        if is_near(ip):
            raise NearHostError(
                f"{host} resolves to {ip}, which is this node or its cloud's metadata service",
            )


def connection_failure(exn: OSError, place: str) -> str:
    """Return an error message: that there is no connection to a place, and why.

    Args:
        place: a host and port, or a socket's path.
    """
    if isinstance(exn, ConnectionRefusedError):
        return f"connection refused by {place}"
    reason = exn.strerror or str(exn)
    # For an unknown host name, the number is negative, and the error's own text is used.
    if exn.errno is not None and exn.errno > 0:
        reason = os.strerror(exn.errno)
    return f"no connection to {place}: {reason}"
