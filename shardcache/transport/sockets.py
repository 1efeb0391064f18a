"""Sockets to origins: connected to the first address to answer, and distrusted after being idle.

A NAT or load balancer may drop an idle connection without notice to either end; whatever is sent over it then is lost.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from shardcache.access.addresses import is_near

T = TypeVar("T")

IDLE_S = 10.0
"""Age at which an idle connection is closed: networks drop one after a minute at the earliest, or on a failover."""

SILENCE_S = 3.0
"""Longest wait for the first byte over a reused connection; the request is then sent again over a new one."""

NEXT_ADDRESS_S = 0.25
"""Head start of each address over the next (RFC 8305, section 5)."""

# A dead peer is noticed within half a minute even if nothing is sent: three keepalive probes after 15 s; data that
# stays unacknowledged also ends the connection.
_OPTIONS = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms
}

# A lookup cannot be cancelled; nobody waits for the threads of those that a dead name server does not answer.
_LOOKUPS = ThreadPoolExecutor(16, thread_name_prefix="lookup")


def new_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket for one of the addresses that `getaddrinfo` returned for a host."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # all of them on Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class NearHostError(Exception):
    """A host's addresses, but not its name, are those of this node or its cloud's metadata service."""


async def connect(host: str, port: int, *, far_only: bool = False) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses to answer.

    Raises OSError that names the host, and with `far_only` NearHostError. The addresses checked are those connected
    to: changing the name in between gains nothing.
    """
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        addresses = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, lookup)
        return await _connected(host, addresses, far_only=far_only)
    except OSError as exn:
        raise ConnectionError(failure(exn, f"{host}:{port}")) from exn


async def _connected(host: str, addresses: Sequence[AddrInfoType], *, far_only: bool) -> socket.socket:
    near = [address[4][0] for address in addresses if is_near(str(address[4][0]))]
    if far_only and near and not is_near(host):
        raise NearHostError(f"{host} resolves to {near[0]}, which is this node or its cloud's metadata service")
    return await aiohappyeyeballs.start_connection(
        addresses, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1, socket_factory=new_socket
    )


def failure(exn: OSError, place: str) -> str:
    """Return why there is no connection to a place."""
    if isinstance(exn, ConnectionRefusedError):
        return f"connection refused by {place}"
    number = exn.errno or 0  # negative for a name that is not known
    return f"no connection to {place}: {os.strerror(number) if number > 0 else exn.strerror or exn}"


class Distrust:
    """Distrust of idle connections after one of them stayed silent.

    Lasts for `IDLE_S`: by then, those that were idle together with the silent one are closed.
    """

    def __init__(self) -> None:
        self._until_s = float("-inf")
        self._answered_s = float("-inf")  # time of the latest answer over a pooled connection

    @property
    def active(self) -> bool:
        """True while idle connections are distrusted."""
        return asyncio.get_running_loop().time() < self._until_s

    def begin(self) -> None:
        """Distrust idle connections from now on."""
        self._until_s = asyncio.get_running_loop().time() + IDLE_S

    async def ask(self, pooled: Callable[[], Awaitable[T]], fresh: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request that may be sent twice: over any connection, then over a new one.

        Args:
            pooled: sends it over an idle connection, if there is one; cancelled after `SILENCE_S`.
            fresh: sends it over a new connection, without a limit on the wait.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        if not self.active:
            try:
                async with asyncio.timeout(SILENCE_S) as patience:
                    answer = await pooled()
                self._answered_s = loop.time()
                return answer
            except TimeoutError:
                if not patience.expired():
                    raise
                self.begin()
            except asyncio.CancelledError:
                if self._answered_s <= asked_s:  # otherwise the pool works, and this was the slower of two requests
                    self.begin()
                raise
        return await fresh()
