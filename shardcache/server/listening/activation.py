"""Socket activation: listening sockets that the service manager has bound (sd_listen_fds(3)).

The service manager, such as systemd, passes them to the daemon as it starts the daemon. They are
called activated sockets.
"""

import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardcache.shared.exceptions import ConfigError

_FIRST_FD = 3  # SD_LISTEN_FDS_START
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_ACCESS_BY_ALL = 0o007  # permission bits of users outside the socket's group


@dataclass(frozen=True, slots=True)
class ActivatedSockets:
    """The sockets that the service manager has bound.

    Attributes:
        unix: socket for jobs and tools; None if the daemon binds its own.
        tcp: sockets for read-only status, in place of those that `--http` would bind.
    """

    unix: socket.socket | None = None
    tcp: tuple[socket.socket, ...] = ()

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> Self:
        """Take the sockets that were passed to the process `pid` according to `env`.

        The variables that say so are removed from `env`. Raises ConfigError for anything other than
        a listening stream socket, for a second Unix socket, and for a Unix socket that every user
        of the node may connect to.
        """
        receiver_pid = env.pop("LISTEN_PID", "")
        count = env.pop("LISTEN_FDS", "")
        env.pop("LISTEN_FDNAMES", "")
        if receiver_pid != str(pid) or not count.isdecimal():
            return cls()

        sockets = [_adopt(fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]
        unix = [sock for sock in sockets if sock.family == socket.AF_UNIX]
        tcp = tuple(sock for sock in sockets if sock.family != socket.AF_UNIX)
        if len(unix) > 1:
            raise ConfigError(
                "more than one activated Unix socket",
                remedy="give the socket unit a single path",
            )
        if not unix:
            return cls(None, tcp)
        _check_not_open_to_all(unix[0])
        return cls(unix[0], tcp)

    def path(self, configured: Path | None) -> Path | None:
        """Return the path of the activated Unix socket; None if there is none.

        Raises ConfigError if another path is configured: clients would find no daemon there.

        Args:
            configured: the path in the settings, if any.
        """
        if self.unix is None:
            return None
        path = Path(self.unix.getsockname())
        if configured is not None and configured.resolve() != path.resolve():
            raise ConfigError(
                f"the activated socket is {path}, but --socket says {configured}",
                remedy="omit --socket, or change ListenStream= in the socket unit",
            )
        return path


def _adopt(fd: int) -> socket.socket:
    """Return the socket of a file descriptor. Raises ConfigError unless the socket listens."""
    try:
        sock = socket.socket(fileno=fd)
        is_listening = False
        # Sockets of other families, such as netlink, may not know the option.
        if sock.family in _FAMILIES:
            is_listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as exn:
        raise ConfigError(
            f"activated file descriptor {fd} is not a socket: {exn.strerror}",
        ) from exn
    if not is_listening or sock.type != socket.SOCK_STREAM:
        raise ConfigError(
            f"activated file descriptor {fd} is not a listening stream socket",
            remedy="use ListenStream= and Accept=no in the socket unit",
        )
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def _check_not_open_to_all(sock: socket.socket) -> None:
    """Raise ConfigError for a Unix socket that every user of the node may connect to."""
    # The name is bytes if it is abstract. Such a socket has no file, and so no mode.
    name = sock.getsockname()
    is_abstract = isinstance(name, bytes)
    if is_abstract or _mode_of(Path(name)) & _ACCESS_BY_ALL:
        raise ConfigError(
            f"every user of this node may connect to the activated socket {name!a}",
            remedy="give the socket unit a path, SocketMode=0660 and SocketGroup=",
        )


def _mode_of(path: Path) -> int:
    """Return the mode of an activated socket's file. Raises ConfigError if there is no file."""
    try:
        return path.stat().st_mode
    except OSError as exn:
        raise ConfigError(
            f"the activated socket {path} has no file at its path: {exn.strerror}",
            remedy="restart the socket unit; RuntimeDirectoryPreserve=yes keeps its folder when "
            "the daemon stops",
        ) from exn
