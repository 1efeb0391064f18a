"""Sockets to stores: opening them to whichever address answers, and distrust of those that lay idle.

A NAT or a load balancer forgets an idle connection and tells neither end; what is sent over it afterwards vanishes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from shardcache.transport.addresses import is_near

T = TypeVar("T")

IDLE_S = 10.0
"""Age at which an idle connection is closed: networks forget one after a minute at the earliest, a failover at once."""

SILENCE_S = 3.0
"""Longest wait for the first byte over a connection that was idle before; the question is then asked over a new one."""

NEXT_ADDRESS_S = 0.25
"""Head start of each address over the next (RFC 8305, section 5)."""

# A peer that is gone is noticed within half a minute, also where nothing is sent: keepalive probes after 15 s, three
# of them; and sent data that nobody acknowledges ends the connection.
_OPTIONS = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms
}


def new_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket for one of a host's addresses, as `getaddrinfo` gives them."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # Linux has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class NearHostError(Exception):
    """A host is this node or its cloud's metadata service by its addresses, and not by its name."""


async def connect(host: str, port: int, *, far_only: bool = False) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses to answer.

    Raises OSError, and with `far_only` NearHostError. The addresses that are judged are those that are connected to: a
    name that changes in between gains nothing.
    """
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    near = [address[4][0] for address in addresses if is_near(str(address[4][0]))]
    if far_only and near and not is_near(host):
        raise NearHostError(f"the name {host} leads to {near[0]}, which is this node or its cloud's metadata service")
    return await aiohappyeyeballs.start_connection(
        addresses, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1, socket_factory=new_socket
    )


class Distrust:
    """Distrust of idle connections, after one of them kept silent.

    For `IDLE_S` all of them are distrusted: by then those that were idle together with the silent one are closed.
    """

    def __init__(self) -> None:
        self._until_s = float("-inf")
        self._answered_s = float("-inf")  # when an answer came last over a connection of the pool

    @property
    def active(self) -> bool:
        """True while idle connections are distrusted."""
        return asyncio.get_running_loop().time() < self._until_s

    def begin(self) -> None:
        """Distrust them from now on."""
        self._until_s = asyncio.get_running_loop().time() + IDLE_S

    async def ask(self, pooled: Callable[[], Awaitable[T]], fresh: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a question that may be asked twice: over any connection, or over a new one.

        Args:
            pooled: asks over an idle connection, where there is one; cancelled after `SILENCE_S`.
            fresh: asks over a new one, with any patience.
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
                if self._answered_s <= asked_s:  # else the pool works, and this was the slower of two requests
                    self.begin()
                raise
        return await fresh()
