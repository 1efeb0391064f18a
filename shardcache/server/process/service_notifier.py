"""Reports to the service manager that started the daemon (sd_notify(3))."""

import asyncio
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, Self, TypeVar

import structlog

from shardcache.shared.units import size
from shardcache.store.store import Store

log = structlog.get_logger()

T = TypeVar("T")

# A disk that is full, read-only or broken still responds; one that hangs blocks the readers too.
# After a restart the daemon finds another disk, or fails to start, and jobs that may read directly
# from the object store do so.
_HUNG_S = 120.0
_TELL_S = 10.0
# Pings per watchdog period: one lost ping, or a late one on a busy node, must not get the daemon
# killed.
_PINGS_A_LIMIT = 3
# Blocking work asks for this much more time repeatedly, up to a total.
_MORE_S = 30.0
_PATIENCE_S = 900.0


class Liveness(NamedTuple):
    """The daemon's liveness at one moment, which does not depend on any origin.

    Attributes:
        alive: False if only a restart can help.
        line: what the daemon serves, or what is wrong.
    """

    alive: bool
    line: str


def liveness(disk: Mapping[str, Any], store: Store, readers: int) -> Liveness:
    """Return the daemon's liveness.

    Calling it on the event loop is itself the proof that the loop is running.
    """
    if disk["silent_s"] > _HUNG_S:
        return Liveness(False, f"The cache disk has not responded for {disk['silent_s']:.0f} s.")

    used = size(store.space.used_bytes)
    capacity = size(store.space.capacity_bytes)
    line = f"{readers} readers; {len(store.shards)} shards, {used} of {capacity}."
    if disk["error"] is not None:
        line += f" Not fetching: {disk['error']['message']}."
    return Liveness(True, line)


class ServiceNotifier:
    """The service manager that started this process."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """Report to the manager at an address.

        Args:
            address: a path, or an abstract name after an "@"; None without a manager.
            watchdog_s: silence after which the manager kills the daemon; None if it does not.
        """
        self._address = address
        self._is_deaf = False
        self._period_s = _TELL_S
        if watchdog_s is not None:
            self._period_s = min(_TELL_S, watchdog_s / _PINGS_A_LIMIT)

    def __repr__(self) -> str:
        return f"ServiceNotifier({self._address!r}, every {self._period_s:g} s)"

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> Self:
        """Read the variables meant for the process `pid` and remove them.

        No child process may notify in its name.
        """
        address = env.pop("NOTIFY_SOCKET", "") or None
        limit_us = env.pop("WATCHDOG_USEC", "")
        watched = env.pop("WATCHDOG_PID", "")
        if limit_us.isdecimal() and int(limit_us) > 0 and watched in ("", str(pid)):
            return cls(address, watchdog_s=int(limit_us) / 1e6)
        return cls(address)

    async def tell(self, **fields: object) -> None:
        """Send one message. Failure is logged once per outage.

        Without messages the manager will stop the daemon.
        """
        if self._address is None:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        message = _message(fields)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect(address)
                await asyncio.get_running_loop().sock_sendall(sock, message)
        except OSError as exn:
            if not self._is_deaf:
                log.warning(
                    "cannot notify the service manager",
                    socket=self._address,
                    cause=str(exn),
                    what=[*fields],
                )
            self._is_deaf = True
        else:
            self._is_deaf = False

    async def watch(self, liveness: Callable[[], Liveness]) -> None:
        """Send the status line, and a watchdog ping while the daemon is alive, until cancelled."""
        while self._address is not None:
            now = liveness()
            fields: dict[str, object] = {"STATUS": now.line}
            if now.alive:
                fields["WATCHDOG"] = 1
            await self.tell(**fields)
            await asyncio.sleep(self._period_s)

    async def have_patience(self, doing: str, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread.

        Keep asking the manager for more time until it returns, within a limit.
        """
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


def _message(fields: Mapping[str, object]) -> bytes:
    """Return a message of one field a line, in whose values white space is one blank."""
    lines = []
    for name, value in fields.items():
        words = str(value).split()
        lines.append(f"{name}={' '.join(words)}")
    return "\n".join(lines).encode()
