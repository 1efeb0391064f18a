"""The addresses of the S3 endpoint: `--s3 HOST:PORT`, on loopback only."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from shardcache.server.listening.addresses import listen, resolve
from shardcache.shared.exceptions import ConfigError

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options of the endpoint.

    Attributes:
        sockets: sockets that listen for S3 clients; empty if there is no endpoint.
        key_life_s: time for which a new key is valid.
        stall_s: time after which a client that reads nothing from its answer is disconnected.
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
        if ":" in host:  # IPv6
            host = f"[{host}]"
        return f"{host}:{port}"


@contextmanager
def listening_for_s3(s3: str | None) -> Iterator[tuple[socket.socket, ...]]:
    """Listen at the addresses of `--s3` during the block; yield the sockets.

    Args:
        s3: the option's value, HOST:PORT; None to yield no sockets.

    Raises:
        ConfigError: the address is invalid, or other machines can reach it.
        DaemonError: the address cannot be bound.
    """
    if s3 is None:
        yield ()
        return
    addresses = resolve("--s3", s3)
    is_loopback = all(ipaddress.ip_address(address).is_loopback for address, _ in addresses)
    if not is_loopback:
        raise ConfigError(
            f"--s3 {s3} can be reached from other machines, but the S3 endpoint has "
            "no encryption and serves only this node's users",
            remedy="listen on 127.0.0.1; each node runs a daemon of its own",
        )
    _, port = addresses[0]
    # For port 0, the kernel would choose another port for each address.
    if port == 0:
        addresses = addresses[:1]
    with ExitStack() as open_sockets:
        sockets: list[socket.socket] = []
        for address in addresses:
            sock = listen("--s3", s3, address, _BACKLOG)
            sockets.append(open_sockets.enter_context(sock))
        yield tuple(sockets)
