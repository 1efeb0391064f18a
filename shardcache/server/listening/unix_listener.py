"""The daemon's Unix socket: bound, or the activated one."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardcache.errors import ConfigError, DaemonError, SocketInUseError

_MODE = 0o660  # owner and group may connect; whoever may connect may use the cache
_BACKLOG = 1024  # all readers of a node may reconnect together after a restart


@contextmanager
def listening_at(
    path: Path,
    group: str | None,
    activated: socket.socket | None = None,
) -> Iterator[socket.socket]:
    """Yield a socket that listens at `path`: the activated one, or a new one, unlinked at the end.

    A new one replaces one left by a killed daemon.

    Args:
        path: where to bind a new socket.
        group: name of the group that may connect to a new socket; None for the user's own.
        activated: the activated socket, if there is one.

    Raises:
        SocketInUseError: a daemon answers there.
        DaemonError: the socket cannot be bound.
    """
    if activated is not None:
        with activated:
            yield activated
        return

    try:
        sock = _bound(path, group)
    except OSError as exn:
        raise DaemonError(
            f"cannot listen at {path}: {exn.strerror or exn}",
            remedy="set --socket to a path of at most 107 bytes in a folder that this user may "
            "write to",
        ) from exn
    try:
        yield sock
    finally:
        sock.close()
        if not _is_answered(path):  # else another daemon listens there by now
            path.unlink(missing_ok=True)


def _bound(path: Path, group: str | None) -> socket.socket:
    if not path.parent.exists():
        path.parent.mkdir(mode=0o700, parents=True)
        if group is not None:
            _give_to(path.parent, group)
            path.parent.chmod(0o750)

    if path.is_socket():
        if _is_answered(path, stale=(ConnectionRefusedError,)):
            raise SocketInUseError("another daemon is listening on the socket", url=str(path))
        path.unlink()

    with ExitStack() as failing:
        sock = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.bind(os.fspath(path))
        if group is not None:
            _give_to(path, group)
        path.chmod(_MODE)  # before listen: nobody can connect while the mode is still the umask's
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        failing.pop_all()
    return sock


def _is_answered(path: Path, stale: tuple[type[OSError], ...] = (OSError,)) -> bool:
    """Return whether a connection to the socket is accepted, False for the errors in `stale`.

    Raises other OSErrors.
    """
    with suppress(*stale), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(os.fspath(path))
        return True
    return False


def _give_to(path: Path, group: str) -> None:
    try:
        shutil.chown(path, group=group)
    except LookupError:
        raise ConfigError(
            f"there is no group {group!r}",
            remedy="correct --group or create the group",
        ) from None
