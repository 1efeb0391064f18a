"""The addresses of the S3 endpoint: `--s3 HOST:PORT`, on the loopback alone."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from shardcache.errors import ConfigError
from shardcache.server.listening.addresses import bound, resolved

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options of the endpoint.

    Attributes:
        sockets: that listen for its clients; none if there is to be no endpoint.
        key_life_s: how long a new key is valid.
        stall_s: how long a client may read nothing of its answer.
    """

    sockets: tuple[socket.socket, ...] = ()
    key_life_s: float = 43_200.0
    stall_s: float = 60.0

    @property
    def address(self) -> str | None:
        """HOST:PORT; None if there is no endpoint."""
        if not self.sockets:
            return None
        host, port = self.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def listening_for_s3(s3: str | None) -> Iterator[tuple[socket.socket, ...]]:
    """Bind the addresses given by `--s3`; none without the option.

    Raises:
        ConfigError: an invalid address, or one that other machines can reach.
        DaemonError: it cannot be bound.
    """
    if s3 is None:
        yield ()
        return
    addresses = resolved("--s3", s3)
    if not all(ipaddress.ip_address(address).is_loopback for address, _ in addresses):
        raise ConfigError(
            f"--s3 {s3} can be reached from other machines, but the S3 endpoint has "
            "no encryption and serves only this node's users",
            remedy="listen on 127.0.0.1; each node runs a daemon of its own",
        )
    with ExitStack() as held:
        first = addresses[0]
        yield tuple(
            held.enter_context(bound("--s3", s3, address, _BACKLOG))
            for address in (addresses if first[1] else [first])  # one port, if any will do
        )
