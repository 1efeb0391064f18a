"""The daemon's Unix socket: binding, permissions and removal."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
