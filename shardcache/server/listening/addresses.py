"""Addresses that an option such as `--http` names, and sockets bound to them."""

import socket

from shardcache.shared.exceptions import ConfigError, DaemonError


def resolve(option: str, text: str) -> list[tuple[str, int]]:
    """Return each address of HOST:PORT, with the port, once. Raises ConfigError.

    Args:
        option: the option that names the address, such as "--http".
        text: the option's value, HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    try:
        if not colon or not port.isdecimal():
            raise ValueError("no port")
        infos = socket.getaddrinfo(
            host.strip("[]") or None,  # None stands for all addresses of the node
            int(port),
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
    except (ValueError, OverflowError, OSError) as exn:
        raise ConfigError(
            f"{option} {text} is not an address: {exn}",
            remedy="write HOST:PORT",
        ) from None
    addresses: dict[tuple[str, int], None] = {}  # a dict has no duplicates, and keeps their order
    for _family, _type, _proto, _canonname, address in infos:
        addresses[str(address[0]), int(address[1])] = None
    return list(addresses)


def listen(option: str, text: str, address: tuple[str, int], backlog: int) -> socket.socket:
    """Return a non-blocking socket that listens at an address. Raises DaemonError.

    Args:
        option: the option that names the address, for errors.
        text: the option's value, for errors.
        address: the address and the port.
        backlog: maximum number of connections that wait to be accepted.
    """
    host, _ = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=backlog)
    except OSError as exn:
        raise DaemonError(
            f"cannot listen at {text}: {exn.strerror or exn}",
            remedy=f"choose another {option}",
        ) from exn
    sock.setblocking(False)
    return sock
