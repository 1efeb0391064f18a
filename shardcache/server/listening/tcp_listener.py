"""The addresses at which the daemon serves read-only status over TCP: `--http HOST:PORT`.

The loopback is the node's own network interface, which no other machine can reach.
"""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardcache.server.listening.addresses import listen, resolve
from shardcache.server.listening.limits import Limits
from shardcache.server.listening.tcp_token import read_token_hash
from shardcache.shared.exceptions import ConfigError

_MAX_CONNECTIONS = 64
_LIFETIME_S = 60.0  # time after which a connection is closed, even if it is in use

# The users of TCP are not known, so they count as one user.
TCP_LIMITS = Limits(_MAX_CONNECTIONS, per_user=_MAX_CONNECTIONS, lifetime_s=_LIFETIME_S)


@dataclass(frozen=True, slots=True)
class TcpListener:
    """Sockets that listen for `--http HOST:PORT`, one for each address of the host.

    Attributes:
        sockets: the listening sockets; empty if there is no TCP.
        token_hash: hash of the token that requests must carry; None without a token file.
    """

    sockets: tuple[socket.socket, ...] = ()
    token_hash: bytes | None = None


@contextmanager
def listening_over_tcp(
    http: str | None,
    token_file: Path | None,
    activated: tuple[socket.socket, ...] = (),
) -> Iterator[TcpListener]:
    """Listen at the addresses of `--http`, or with the activated sockets, during the block.

    Activated sockets are listening sockets that the service manager has passed to the daemon.

    Args:
        http: the option's value, HOST:PORT; None without the option.
        token_file: file with the token that requests must carry; None for no token.
        activated: the activated sockets; empty if there are none.

    Raises:
        ConfigError: there are both an address and activated sockets; or the address or token file
            is invalid; or other machines can reach the address, but there is no token.
        DaemonError: the address cannot be bound.
    """
    if http is None and not activated:
        yield TcpListener()
        return
    if http is not None and activated:
        raise ConfigError("--http conflicts with the activated TCP socket", remedy="omit --http")

    token_hash = None
    if token_file is not None:
        token_hash = read_token_hash(token_file)
    if http is None:
        addresses = [sock.getsockname()[:2] for sock in activated]
    else:
        addresses = resolve("--http", http)
    is_loopback = all(ipaddress.ip_address(address).is_loopback for address, _ in addresses)
    if token_hash is None and not is_loopback:
        raise ConfigError(
            f"{http or addresses} can be reached from other machines, but there is no token",
            remedy="set --http-token-file, or listen on 127.0.0.1",
        )

    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(sock) for sock in activated]
        if http is not None:
            for address in addresses:
                sock = listen("--http", http, address, _MAX_CONNECTIONS)
                sockets.append(open_sockets.enter_context(sock))
        yield TcpListener(tuple(sockets), token_hash)
