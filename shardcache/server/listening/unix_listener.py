"""The daemon's Unix socket: a new socket, or the activated one.

An activated socket is one that the service manager has bound and passed to the daemon.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardcache.shared.exceptions import ConfigError, DaemonError, SocketInUseError

# Mode of the socket: its owner and its group may connect, and so use the cache.
_MODE = 0o660
# Number of connections that may wait to be accepted. After a restart of the daemon, all readers of
# a node may reconnect at the same time.
_BACKLOG = 1024


@contextmanager
def listening_at(
    path: Path,
    group: str | None,
    activated: socket.socket | None = None,
) -> Iterator[socket.socket]:
    """Yield the activated socket, or a new one that listens at `path`.

    A new socket replaces the socket of a daemon that was killed, and is unlinked after the block.

    Args:
        path: path of a new socket.
        group: name of the group that may connect to a new socket; None for the user's own group.
        activated: the activated socket; None if there is none.

    Raises:
        SocketInUseError: another daemon accepts connections at the path.
        DaemonError: the socket cannot be bound.
    """
    if activated is not None:
        with activated:
            yield activated
        return

    try:
        sock = _listen(path, group)
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
        # Another daemon may have replaced the socket with its own, which must stay.
        is_replaced = _is_answered(path)
        if not is_replaced:
            path.unlink(missing_ok=True)


def _listen(path: Path, group: str | None) -> socket.socket:
    """Return a new socket that listens at a path.

    Arguments and errors are those of `listening_at`, except that an OSError is not translated.
    """
    # A new folder is closed to other users, except to the members of the group.
    if not path.parent.exists():
        path.parent.mkdir(mode=0o700, parents=True)
        if group is not None:
            _change_group(path.parent, group)
            path.parent.chmod(0o750)

    if path.is_socket():
        # Only a refused connection proves that no daemon listens there: a daemon's socket may also
        # fail to answer for other reasons, such as a missing permission.
        if _is_answered(path, unanswered=(ConnectionRefusedError,)):
            raise SocketInUseError("another daemon is listening on the socket", url=str(path))
        path.unlink()

    with ExitStack() as closed_on_failure:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        closed_on_failure.enter_context(sock)
        sock.bind(os.fspath(path))
        if group is not None:
            _change_group(path, group)
        # The mode is set before `listen`, so that nobody can connect with the mode of the umask.
        path.chmod(_MODE)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        closed_on_failure.pop_all()  # nothing has failed: the socket stays open
    return sock


def _is_answered(path: Path, unanswered: tuple[type[OSError], ...] = (OSError,)) -> bool:
    """Return whether a daemon accepts a connection to the socket.

    Args:
        unanswered: errors that mean that no daemon accepts it; other errors are raised.
    """
    with suppress(*unanswered), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(os.fspath(path))
        return True
    return False


def _change_group(path: Path, group: str) -> None:
    """Change the group of a file. Raises ConfigError if there is no such group."""
    try:
        shutil.chown(path, group=group)
    except LookupError:
        raise ConfigError(
            f"there is no group {group!r}",
            remedy="correct --group or create the group",
        ) from None
