"""Sockets that a service manager has bound and hands over (sd_listen_fds(3)).

They stay open while one daemon goes and the next comes: who connects meanwhile waits in the queue, refused by nobody.
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardcache.errors import ConfigError

_FIRST_FD = 3
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_OTHERS = 0o007


@dataclass(frozen=True, slots=True)
class Handed:
    """What was handed over.

    Attributes:
        unix: the socket of jobs and tools, or None: the daemon makes its own.
        tcp: sockets for reading status, in place of those that `--http` would make.
    """

    unix: socket.socket | None = None
    tcp: tuple[socket.socket, ...] = ()

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> Self:
        """Take over what `env` says to be handed to the process `pid`, and take that out of `env`.

        Raises ConfigError for what is no listening stream socket, for a second Unix socket, and for one that every user
        of the node may connect to.
        """
        meant_for, count, _names = (env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
        if meant_for != str(pid) or not count.isdecimal():
            return cls()
        sockets = [_adopt(fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]
        unix = [sock for sock in sockets if sock.family == socket.AF_UNIX]
        if len(unix) > 1:
            raise ConfigError("two Unix sockets are handed over", remedy="give the socket unit one path")
        for sock in unix:
            _check_guarded(sock)
        return cls(unix[0] if unix else None, tuple(sock for sock in sockets if sock not in unix))

    def path(self, asked_for: Path | None) -> Path | None:
        """Return where the Unix socket is, None without one.

        Raises ConfigError when another place was asked for: clients would look there, and find nobody.
        """
        if self.unix is None:
            return None
        path = Path(self.unix.getsockname())
        if asked_for is not None and asked_for.resolve() != path.resolve():
            raise ConfigError(
                f"the socket that is handed over is {path}, and --socket says {asked_for}",
                remedy="leave --socket out, or change ListenStream= in the socket unit",
            )
        return path


def _adopt(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.family in _FAMILIES and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as exn:
        raise ConfigError(f"file descriptor {fd}, handed over as a socket, is none: {exn.strerror}") from exn
    if not listens or sock.type != socket.SOCK_STREAM:
        raise ConfigError(
            f"file descriptor {fd}, handed over, is no listening stream socket",
            remedy="use ListenStream= and Accept=no in the socket unit",
        )
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def _check_guarded(sock: socket.socket) -> None:
    name = sock.getsockname()
    try:
        # An abstract name, which comes as bytes, has no mode: whoever is on the node may connect to it.
        is_open = not isinstance(name, str) or Path(name).stat().st_mode & _OTHERS
    except OSError as exn:
        raise ConfigError(
            f"the socket {name} is handed over, but nobody finds it there: {exn.strerror}",
            remedy="restart the socket unit; RuntimeDirectoryPreserve=yes keeps its folder when the daemon stops",
        ) from exn
    if is_open:
        raise ConfigError(
            f"every user of this node may connect to the socket {name!a}, which is handed over",
            remedy="give the socket unit a path, SocketMode=0660 and SocketGroup=",
        )
