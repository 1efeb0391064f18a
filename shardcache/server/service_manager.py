"""Reports to the service manager (sd_notify(3)): ready, alive, stopping."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import structlog

from shardcache.store.store import Store
from shardcache.units import size

# A disk that is full, read-only or broken still responds; one that hangs blocks the readers too. After a restart the
# daemon finds another disk, or fails to start, and jobs that may read directly from the object store do so.
_HUNG_S = 120.0


@dataclass(frozen=True, slots=True)
class Liveness:
    """The daemon's liveness at one moment.

    Attributes:
        alive: False if only a restart can help. Does not depend on any origin.
        line: status line: what the daemon serves, or what is wrong.
    """

    alive: bool
    line: str


def liveness(disk: Mapping[str, Any], store: Store, readers: int) -> Liveness:
    """Return the daemon's liveness, given the disk's state from `Cache.health` and the number of connected readers.

    Calling it on the event loop is itself the proof that the loop is running.
    """
    if disk["silent_s"] > _HUNG_S:
        return Liveness(False, f"The cache disk has not responded for {disk['silent_s']:.0f} s.")
    used, capacity = map(size, (store.space.used_bytes, store.space.capacity_bytes))
    trouble = "" if disk["error"] is None else f" Not fetching: {disk['error']['message']}."
    return Liveness(True, f"{readers} readers; {len(store.shards)} shards, {used} of {capacity}.{trouble}")


log = structlog.get_logger()

T = TypeVar("T")

_TELL_S = 10.0
# Pings per watchdog period: one lost ping, or a late one on a busy node, must not get the daemon killed.
_PINGS_A_LIMIT = 3
# Blocking work asks for this much more time repeatedly, up to a total.
_MORE_S = 30.0
_PATIENCE_S = 900.0


class ServiceNotifier:
    """The service manager that started this process.

    Args:
        address: the manager's socket: a path, or an abstract name after an "@"; None without a manager.
        watchdog_s: silence after which the manager kills the daemon, in seconds; None without a watchdog.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = address
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
