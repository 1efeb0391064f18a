"""The addresses at which the daemon serves read-only status over TCP: `--http HOST:PORT`."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardcache.errors import ConfigError, DaemonError
from shardcache.server.listening.limits import Limits
from shardcache.server.tcp_token import token_hash

_CONNECTIONS = 64

TCP_LIMITS = Limits(_CONNECTIONS, per_user=_CONNECTIONS, limit_s=60.0)


@dataclass(frozen=True, slots=True)
class Listener:
    """Bound sockets of one `--http HOST:PORT`, one for each address of the host.

    Attributes:
        sockets: the bound sockets.
        token_hash: of the token that requests must carry; None without a token file.
    """

    sockets: tuple[socket.socket, ...] = ()
    token_hash: bytes | None = None


@contextmanager
def listening(
    http: str | None,
    token_file: Path | None,
    handed: tuple[socket.socket, ...] = (),
) -> Iterator[Listener]:
    """Bind the address given by `--http`, or use the activated sockets, if there are any.

    Args:
        http: HOST:PORT; None without the option.
        token_file: holds the token that requests must carry.
        handed: the activated sockets.

    Raises:
        ConfigError: both an address and activated sockets; an invalid address or token file; or an
            address beyond the loopback without a token.
        DaemonError: the address cannot be bound.
    """
    if http is None and not handed:
        yield Listener()
        return
    if http is not None and handed:
        raise ConfigError("--http conflicts with the activated TCP socket", remedy="omit --http")

    wanted_hash = None if token_file is None else token_hash(token_file)
    if http is None:
        addresses = [sock.getsockname()[:2] for sock in handed]
    else:
        addresses = _addresses(http)
    is_for_node = all(ipaddress.ip_address(address).is_loopback for address, _ in addresses)
    if wanted_hash is None and not is_for_node:
        raise ConfigError(
            f"{http or addresses} can be reached from other machines, but there is no token",
            remedy="set --http-token-file, or listen on 127.0.0.1",
        )

    with ExitStack() as bound:
        sockets = [bound.enter_context(sock) for sock in handed]
        if http is not None:
            for address in addresses:
                sock = _bind(http, address)
                sockets.append(bound.enter_context(sock))
        yield Listener(tuple(sockets), wanted_hash)


def _addresses(http: str) -> list[tuple[str, int]]:
    host, colon, port = http.rpartition(":")
    try:
        if not colon or not port.isdecimal():
            raise ValueError("no port")
        name = host.strip("[]") or None
        found = socket.getaddrinfo(
            name,
            int(port),
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
    except (ValueError, OverflowError, OSError) as exn:
        raise ConfigError(
            f"--http {http} is not an address: {exn}",
            remedy="write HOST:PORT",
        ) from None
    addresses = [(str(address[0]), int(address[1])) for *_, address in found]
    return list(dict.fromkeys(addresses))


def _bind(http: str, address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=_CONNECTIONS)
    except OSError as exn:
        raise DaemonError(
            f"cannot listen at {http}: {exn.strerror or exn}",
            remedy="choose another --http",
        ) from exn
    sock.setblocking(False)
    return sock
