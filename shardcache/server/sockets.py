"""The daemon's sockets: bound by itself, or by the service manager (socket activation, sd_listen_fds(3))."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardcache.errors import ConfigError, DaemonError, SocketInUseError

_MODE = 0o660  # owner and group may connect; whoever may connect may use the cache
# All readers of a node may reconnect together after a restart.
BACKLOG = 1024


@contextmanager
def listening_at(path: Path, group: str | None, handed: socket.socket | None = None) -> Iterator[socket.socket]:
    """Yield a socket that listens at `path`: the activated one, or a new one that is unlinked at the end.

    Raises whatever `bind_socket` raises.
    """
    if handed is not None:
        with handed:
            yield handed
        return
    sock = bind_socket(path, group)
    try:
        yield sock
    finally:
        unlink_socket(path, sock)


def bind_socket(path: Path, group: str | None) -> socket.socket:
    """Return a listening socket at `path`, replacing one left by a killed daemon.

    Raises SocketInUseError if a daemon answers there, DaemonError if the socket cannot be bound.
    """
    try:
        if not path.parent.exists():
            _make_folder(path.parent, group)
        if path.is_socket():
            _remove_stale(path)
        return _bind(path, group)
    except OSError as exn:
        raise DaemonError(
            f"cannot listen at {path}: {exn.strerror or exn}",
            remedy="set --socket to a path of at most 107 bytes in a folder that this user may write to",
        ) from exn


def unlink_socket(path: Path, sock: socket.socket) -> None:
    """Close the socket and remove its path, unless another daemon listens there by now."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        sock.close()
        probe.connect(os.fspath(path))
        return
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _bind(path: Path, group: str | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        _give_to(path, group)
        path.chmod(_MODE)  # before listen: nobody can connect while the mode is still the umask's
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _make_folder(folder: Path, group: str | None) -> None:
    folder.mkdir(mode=0o700, parents=True)
    if group is not None:
        _give_to(folder, group)
        folder.chmod(0o750)


def _give_to(path: Path, group: str | None) -> None:
    if group is None:
        return
    try:
        shutil.chown(path, group=group)
    except LookupError:
        raise ConfigError(f"there is no group {group!r}", remedy="correct --group or create the group") from None


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise SocketInUseError("another daemon is listening on the socket", url=str(path))


_FIRST_FD = 3
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_OTHERS = 0o007


@dataclass(frozen=True, slots=True)
class ActivatedSockets:
    """The activated sockets.

    Attributes:
        unix: the socket for jobs and tools; None if the daemon makes its own.
        tcp: sockets for read-only status, in place of those that `--http` would bind.
    """

    unix: socket.socket | None = None
    tcp: tuple[socket.socket, ...] = ()

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> Self:
        """Take the sockets that `env` says were passed to the process `pid`, and remove the variables from `env`.

        Raises ConfigError for anything other than a listening stream socket, for a second Unix socket, and for a Unix
        socket that every user of the node may connect to.
        """
        meant_for, count, _names = (env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
        if meant_for != str(pid) or not count.isdecimal():
            return cls()
        sockets = [_adopt(fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]
        unix = [sock for sock in sockets if sock.family == socket.AF_UNIX]
        if len(unix) > 1:
            raise ConfigError("more than one activated Unix socket", remedy="give the socket unit a single path")
        for sock in unix:
            _check_guarded(sock)
        return cls(unix[0] if unix else None, tuple(sock for sock in sockets if sock not in unix))

    def path(self, asked_for: Path | None) -> Path | None:
        """Return the path of the activated Unix socket, None without one.

        Raises ConfigError if `asked_for` is another path: clients would look there and find no daemon.
        """
        if self.unix is None:
            return None
        path = Path(self.unix.getsockname())
        if asked_for is not None and asked_for.resolve() != path.resolve():
            raise ConfigError(
                f"the activated socket is {path}, but --socket says {asked_for}",
                remedy="omit --socket, or change ListenStream= in the socket unit",
            )
        return path


def _adopt(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.family in _FAMILIES and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as exn:
        raise ConfigError(f"activated file descriptor {fd} is not a socket: {exn.strerror}") from exn
    if not listens or sock.type != socket.SOCK_STREAM:
        raise ConfigError(
            f"activated file descriptor {fd} is not a listening stream socket",
            remedy="use ListenStream= and Accept=no in the socket unit",
        )
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def _check_guarded(sock: socket.socket) -> None:
    name = sock.getsockname()
    try:
        # An abstract name (bytes) has no mode: every user of the node may connect to it.
        is_open = not isinstance(name, str) or Path(name).stat().st_mode & _OTHERS
    except OSError as exn:
        raise ConfigError(
            f"the activated socket {name} has no file at its path: {exn.strerror}",
            remedy="restart the socket unit; RuntimeDirectoryPreserve=yes keeps its folder when the daemon stops",
        ) from exn
    if is_open:
        raise ConfigError(
            f"every user of this node may connect to the activated socket {name!a}",
            remedy="give the socket unit a path, SocketMode=0660 and SocketGroup=",
        )
