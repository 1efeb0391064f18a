"""Addresses that an option such as `--http` names, and sockets bound to them."""

import socket

from shardcache.errors import ConfigError, DaemonError


def resolved(option: str, text: str) -> list[tuple[str, int]]:
    """Return the addresses and ports that HOST:PORT stands for. Raises ConfigError.

    Args:
        option: the option that names the address, such as "--http".
        text: the option's value, HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    try:
        if not colon or not port.isdecimal():
            raise ValueError("no port")
        name = host.strip("[]") or None
        infos = socket.getaddrinfo(
            name,
            int(port),
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
    except (ValueError, OverflowError, OSError) as exn:
        raise ConfigError(
            f"{option} {text} is not an address: {exn}",
            remedy="write HOST:PORT",
        ) from None
    addresses = [(str(address[0]), int(address[1])) for *_, address in infos]
    return list(dict.fromkeys(addresses))  # without duplicates


def bound(option: str, text: str, address: tuple[str, int], backlog: int) -> socket.socket:
    """Return a non-blocking socket that listens at an address. Raises DaemonError.

    Args:
        option: the option that names the address, for errors.
        text: the option's value, for errors.
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
