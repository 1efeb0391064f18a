"""The daemon's Unix socket, bound or activated, and acceptance of connections within limits on their number and time.

Not the event loop's own acceptance: without a free descriptor, asyncio's stops for a second and uvloop's for good.
"""

import asyncio
import json
import os
import resource
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import structlog

from shardcache.config import Settings
from shardcache.errors import ConfigError, DaemonError, ExhaustedError, SocketInUseError
from shardcache.unix_socket import credentials

log = structlog.get_logger()

_MODE = 0o660  # owner and group may connect; whoever may connect may use the cache
_OTHERS = 0o007
_BACKLOG = 1024  # all readers of a node may reconnect together after a restart


@contextmanager
def listening_at(path: Path, group: str | None, handed: socket.socket | None = None) -> Iterator[socket.socket]:
    """Yield a socket that listens at `path`: the activated one, or a new one that is unlinked at the end.

    A new one replaces one left by a killed daemon. Raises SocketInUseError if a daemon answers there, DaemonError if
    the socket cannot be bound.
    """
    if handed is not None:
        with handed:
            yield handed
        return
    try:
        sock = _bound(path, group)
    except OSError as exn:
        remedy = "set --socket to a path of at most 107 bytes in a folder that this user may write to"
        raise DaemonError(f"cannot listen at {path}: {exn.strerror or exn}", remedy=remedy) from exn
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
    """Return whether a connection to the socket is accepted, False for the errors in `stale`. Raises other OSErrors."""
    with suppress(*stale), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(os.fspath(path))
        return True
    return False


def _give_to(path: Path, group: str) -> None:
    try:
        shutil.chown(path, group=group)
    except LookupError:
        raise ConfigError(f"there is no group {group!r}", remedy="correct --group or create the group") from None


# Socket activation (sd_listen_fds(3))

_FIRST_FD = 3
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class ActivatedSockets:
    """The sockets that the service manager bound."""

    unix: socket.socket | None = None  # for jobs and tools; None if the daemon makes its own
    tcp: tuple[socket.socket, ...] = ()  # for read-only status, in place of those that `--http` would bind

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
            remedy = "omit --socket, or change ListenStream= in the socket unit"
            raise ConfigError(f"the activated socket is {path}, but --socket says {asked_for}", remedy=remedy)
        return path


def _adopt(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.family in _FAMILIES and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as exn:
        raise ConfigError(f"activated file descriptor {fd} is not a socket: {exn.strerror}") from exn
    if not listens or sock.type != socket.SOCK_STREAM:
        remedy = "use ListenStream= and Accept=no in the socket unit"
        raise ConfigError(f"activated file descriptor {fd} is not a listening stream socket", remedy=remedy)
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


# Limits

# Descriptors for the daemon's own files, processes and TCP connections; for a connection to an origin; for a transfer.
_OWN_FILES = 160
_FILES_PER_CONNECTION = 2
_FILES_PER_TRANSFER = 6
_MAX_CONNECTIONS = 8192  # a connection takes some 20 KiB
_FIRST_REQUEST_S = 10.0  # a client that connects sends its request immediately
# Connections accepted in one turn of the event loop, and the pause without a descriptor for the next.
_AT_ONCE = 64
_PAUSE_S = 0.2
_LOG_PERIOD_S = 60.0
_END_OF_HEAD = b"\r\n\r\n"
_REMEDY = "run fewer readers, or raise the daemon's limit of open files: LimitNOFILE= in its unit, or ulimit -n"


def own_files(settings: Settings) -> int:
    """Return how many descriptors the daemon needs for itself."""
    connections, transfers = settings.max_connections, settings.max_transfers
    return _OWN_FILES + _FILES_PER_CONNECTION * connections + _FILES_PER_TRANSFER * transfers


def raise_open_files() -> None:
    """Raise this process's limit of open files as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a listening socket's connections: on their number at a time, and on the time of each."""

    connections: int
    per_user: int  # of one user other than root and the daemon's own
    limit_s: float  # lifetime, or the time until the first request has arrived
    first_only: bool = False  # True if `limit_s` applies to the first request

    @classmethod
    def of_socket(cls, settings: Settings) -> "Limits":
        """Return the limits of the Unix socket: those of the settings, within the present limit of open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        possible = max(files // 4, files - own_files(settings))
        connections = min(possible, settings.socket_connections or _MAX_CONNECTIONS)
        return cls(connections, settings.user_connections or connections // 2, _FIRST_REQUEST_S, first_only=True)

    def check_sessions(self, sessions: int) -> None:
        """Raise ExhaustedError if there may be no further session.

        Not all connections may be sessions: the rest is for commands, metrics and probes, which soon end.
        """
        if sessions >= self.connections - max(4, self.connections // 8):
            raise ExhaustedError(f"the daemon has {sessions} readers, its maximum", remedy=_REMEDY)


class Acceptor:
    """Accepts connections for protocols of `inner`; every connection beyond the limits gets an HTTP 503 at once."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], limits: Callable[[], Limits]) -> None:
        self.connections: Counter[int | None] = Counter()  # open ones by user; None stands for the users of TCP
        self._inner = inner
        self._limits = limits
        self._serving: set[asyncio.Task[None]] = set()
        self._logged_s = -_LOG_PERIOD_S

    @contextmanager
    def accepting(self, sock: socket.socket) -> Iterator[None]:
        """Accept the connections of a non-blocking listening socket during the block."""
        self._listen(sock)
        try:
            yield
        finally:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()  # a pause may be about to end

    def _listen(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as exn:  # the socket remains readable: without a pause, this would be called all the time
                self._log("cannot accept connections; pausing", cause=exn.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(sock)
                loop.call_later(_PAUSE_S, self._listen, sock)
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        uid = credentials(connection)[1] if connection.family == socket.AF_UNIX else None
        limits = self._limits()
        if (refusal := self._refusal(uid, limits)) is not None:
            self._log("connections refused", uid=uid, cause=refusal)
            with suppress(OSError), connection:
                connection.send(_answer(ExhaustedError(refusal, remedy=_REMEDY)))
            return
        self.connections[uid] += 1
        protocol = _Limited(self._inner(), limits, lambda: self._left(uid))
        task = asyncio.get_running_loop().create_task(_serve(connection, protocol))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _refusal(self, uid: int | None, limits: Limits) -> str | None:
        if self.connections.total() >= limits.connections:
            return f"the daemon has {limits.connections} connections, its maximum"
        if uid not in (None, 0, os.getuid()) and self.connections[uid] >= limits.per_user:
            return f"this user has {limits.per_user} connections to the daemon, the maximum for one"
        return None

    def _left(self, uid: int | None) -> None:
        self.connections[uid] -= 1
        if not self.connections[uid]:
            del self.connections[uid]

    def _log(self, event: str, **fields: object) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_PERIOD_S:
            self._logged_s = now_s
            log.warning(event, **fields)


async def _serve(connection: socket.socket, protocol: "_Limited") -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
    except OSError:  # the client is gone already
        connection.close()
        protocol.connection_lost(None)


class _Limited(asyncio.Protocol):
    """Passes a connection's events to `inner`, and ends the connection when its time is over."""

    def __init__(self, inner: asyncio.Protocol, limits: Limits, left: Callable[[], None]) -> None:
        self._inner = inner
        self._limits = limits
        self._left = left
        self._timer: asyncio.TimerHandle | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not `close`: that would wait until the client has read everything written.
        end = cast(asyncio.WriteTransport, transport).abort
        self._timer = asyncio.get_running_loop().call_later(self._limits.limit_s, end)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        if self._timer is not None:
            self._timer.cancel()
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None and self._limits.first_only and not self._timer.cancelled():
            if _END_OF_HEAD in self._tail + data:
                self._timer.cancel()
            self._tail = (self._tail + data)[1 - len(_END_OF_HEAD) :]
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def _answer(error: ExhaustedError) -> bytes:
    body = json.dumps({"error": error.to_json()}).encode()
    head = "HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}"
    return "\r\n".join([*head, "Connection: close", "", ""]).encode() + body
