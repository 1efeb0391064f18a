"""The daemon's start and end: reports to the service manager (sd_notify(3)), takeover from a previous daemon, drain."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import structlog
from aiohttp import WSCloseCode, web

from shardcache.errors import StoppingError
from shardcache.store.store import Store
from shardcache.units import size
from shardcache.unix_socket import connected, credentials, health

log = structlog.get_logger()

T = TypeVar("T")

# A disk that is full, read-only or broken still responds; one that hangs blocks the readers too. After a restart the
# daemon finds another disk, or fails to start, and jobs that may read directly from the object store do so.
_HUNG_S = 120.0
_TELL_S = 10.0
# Pings per watchdog period: one lost ping, or a late one on a busy node, must not get the daemon killed.
_PINGS_A_LIMIT = 3
# Blocking work asks for this much more time repeatedly, up to a total.
_MORE_S = 30.0
_PATIENCE_S = 900.0


class Liveness(NamedTuple):
    """The daemon's liveness at one moment, which does not depend on any origin: False if only a restart can help."""

    alive: bool
    line: str  # what the daemon serves, or what is wrong


def liveness(disk: Mapping[str, Any], store: Store, readers: int) -> Liveness:
    """Return the daemon's liveness. Calling it on the event loop is itself the proof that the loop is running."""
    if disk["silent_s"] > _HUNG_S:
        return Liveness(False, f"The cache disk has not responded for {disk['silent_s']:.0f} s.")
    used, capacity = map(size, (store.space.used_bytes, store.space.capacity_bytes))
    trouble = "" if disk["error"] is None else f" Not fetching: {disk['error']['message']}."
    return Liveness(True, f"{readers} readers; {len(store.shards)} shards, {used} of {capacity}.{trouble}")


class ServiceNotifier:
    """The service manager that started this process; after `watchdog_s` of silence, if given, it kills the daemon."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = address  # a path, or an abstract name after an "@"; None without a manager
        self._is_deaf = False
        self._period_s = _TELL_S if watchdog_s is None else min(_TELL_S, watchdog_s / _PINGS_A_LIMIT)

    def __repr__(self) -> str:
        return f"ServiceNotifier({self._address!r}, every {self._period_s:g} s)"

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> Self:
        """Read the variables meant for the process `pid` and remove them: no child process may notify in its name."""
        address, limit_us, watched = (env.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
        is_watched = limit_us.isdecimal() and int(limit_us) > 0 and watched in ("", str(pid))
        return cls(address or None, int(limit_us) / 1e6 if is_watched else None)

    async def tell(self, **fields: object) -> None:
        """Send one message. Failure is logged once per outage; without messages the manager will stop the daemon."""
        if self._address is None:
            return
        message = "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in fields.items()).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect("\0" + self._address[1:] if self._address.startswith("@") else self._address)
                await asyncio.get_running_loop().sock_sendall(sock, message)
        except OSError as exn:
            if not self._is_deaf:
                log.warning("cannot notify the service manager", socket=self._address, cause=str(exn), what=[*fields])
            self._is_deaf = True
        else:
            self._is_deaf = False

    async def watch(self, liveness: Callable[[], Liveness]) -> None:
        """Send the status line, and a watchdog ping while the daemon is alive, until cancelled."""
        while self._address is not None:
            now = liveness()
            await self.tell(STATUS=now.line, **({"WATCHDOG": 1} if now.alive else {}))
            await asyncio.sleep(self._period_s)

    async def have_patience(self, doing: str, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread; keep asking the manager for more time until it returns, within a limit."""
        work = asyncio.get_running_loop().run_in_executor(None, call)
        for _ in range(int(_PATIENCE_S / self._period_s)):
            await asyncio.wait([work], timeout=self._period_s)
            if work.done():
                break
            await self.ask_for_time(_MORE_S, STATUS=doing)
        return await work

    async def ask_for_time(self, limit_s: float, **fields: object) -> None:
        """Extend the manager's timeout for the current start or stop by `limit_s`."""
        await self.tell(**fields, EXTEND_TIMEOUT_USEC=int(limit_s * 1e6))


# Takeover

_ASK_TIMEOUT_S = 2.0


async def predecessor_gone(path: Path, limit_s: float) -> None:
    """Wait until a stopping daemon at the socket has ended, so that the next one can be started at any time.

    Returns immediately if none is stopping, and after `limit_s` in any case: binding the socket or locking the folder
    then fails with its own error. A daemon in another PID namespace cannot be watched and is not waited for.
    """
    with suppress(ProcessLookupError, TimeoutError):
        async with asyncio.timeout(limit_s):
            pid = await asyncio.to_thread(_stopping, path)
            if pid is not None:
                log.info("waiting for the previous daemon to stop", pid=pid)
                await _ended(pid)


def _stopping(path: Path) -> int | None:
    """Return the process id of the daemon at the socket, if it is stopping; None in another PID namespace. Blocks."""
    with suppress(OSError, ValueError):  # no daemon, or something else: binding the socket reports it
        if health(path, _ASK_TIMEOUT_S)["status"] == "draining":
            with connected(path, _ASK_TIMEOUT_S) as sock:
                return credentials(sock)[0] or None
    return None


async def _ended(pid: int) -> None:
    """Wait for a process that is not our child (pidfd_open(2)). Raises ProcessLookupError if there is none."""
    loop, ended, fd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    try:
        loop.add_reader(fd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


# Longer requests must be sent to the next daemon again; busy or frozen readers do not answer the close handshake.
_DRAIN_LIMIT_S = 3.0


class Drain:
    """The running requests and sessions of a server, and its shutdown."""

    def __init__(self) -> None:
        self.began = False  # True once the daemon is shutting down
        self.sessions: set[web.WebSocketResponse] = set()  # of the connected readers
        self._errands: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._used_s = time.monotonic()  # end of the latest session or request

    @contextmanager
    def errand(self) -> Iterator[None]:
        """Track a request that shutdown waits for. Raises StoppingError if the daemon is already stopping."""
        if self.began:
            raise StoppingError("the daemon is stopping")
        task = asyncio.current_task()
        assert task is not None
        self._errands.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._errands.remove(task)
            self._used_s = time.monotonic()
            if not self._errands:
                self._idle.set()

    async def unused(self, for_s: float) -> None:
        """Return once there has been no session, and no request that changes something, for `for_s` seconds."""
        used_s = None
        while used_s != self._used_s or self._errands:
            await self._idle.wait()
            used_s = self._used_s
            await asyncio.sleep(used_s + for_s - time.monotonic())

    async def run(self) -> None:
        """Close the readers' sessions, wait for running requests, and cancel those that take too long."""
        self.began = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_LIMIT_S):
                async with asyncio.TaskGroup() as closing:
                    for session in self.sessions.copy():
                        closing.create_task(session.close(code=WSCloseCode.GOING_AWAY, message=b"stopping"))
                await self._idle.wait()
        for task in self._errands:
            task.cancel()
        await self._idle.wait()
