"""Reports to the service manager that started the daemon (sd_notify(3)).

The service manager is systemd or a program that behaves like it. It learns when the daemon is ready
or stopping, and shows a status line. A ping is a message that shows that the daemon is alive: if
there is none for the watchdog period, the manager kills the daemon and starts it again.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, Self, TypeVar

import structlog

from shardcache.shared.units import size
from shardcache.store.store import Store

log = structlog.get_logger()

T = TypeVar("T")

# If the disk does not respond for this time, its readers hang: the daemon counts as dead, and the
# manager restarts it. The new daemon does not start until the disk responds again, and jobs that
# may read directly from the object store can do that until then. A disk that is full, read-only or
# broken still responds.
_HUNG_S = 120.0
# Maximum interval between two messages.
_INTERVAL_S = 10.0
# Number of pings per watchdog period: the daemon must not be killed because of one lost ping, or a
# late ping on a busy node.
_PINGS_PER_WATCHDOG_PERIOD = 3
# During blocking work, each message asks the manager for this much time from then on.
_MORE_TIME_S = 30.0
# Once blocking work has taken this time, the daemon asks for no more.
_MAX_WORK_S = 900.0


class Liveness(NamedTuple):
    """The daemon's liveness at one moment, which does not depend on the object store.

    Attributes:
        alive: False if only a restart of the daemon can help.
        line: status line, which states the daemon's load, or the fault.
    """

    alive: bool
    line: str


def liveness(disk: Mapping[str, Any], store: Store, readers: int) -> Liveness:
    """Return the daemon's liveness.

    It must be called on the event loop: its result then proves that the loop runs.

    Args:
        disk: the state of the disk, as `DiskHealth.to_json` returns it.
        store: the files of the cache.
        readers: number of connected readers.
    """
    if disk["silent_s"] > _HUNG_S:
        line = f"The cache disk has not responded for {disk['silent_s']:.0f} s."
        return Liveness(alive=False, line=line)

    used = size(store.space.used_bytes)
    capacity = size(store.space.capacity_bytes)
    line = f"{readers} readers; {len(store.shards)} shards, {used} of {capacity}."
    if disk["error"] is not None:
        line += f" Not fetching: {disk['error']['message']}."
    return Liveness(alive=True, line=line)


class ServiceNotifier:
    """Reports to the service manager that started this process, if one did."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """Report to the manager at an address.

        Args:
            address: path of the manager's socket, or an abstract name after an "@"; None if there
                is no manager.
            watchdog_s: time without a ping after which the manager kills the daemon; None if the
                manager has no watchdog.
        """
        self._address = address
        self._is_unreachable = False
        self._period_s = _INTERVAL_S
        if watchdog_s is not None:
            self._period_s = min(_INTERVAL_S, watchdog_s / _PINGS_PER_WATCHDOG_PERIOD)

    def __repr__(self) -> str:
        return f"ServiceNotifier({self._address!r}, every {self._period_s:g} s)"

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> Self:
        """Read the manager's environment variables, and remove them.

        Otherwise child processes would inherit the variables, and could send reports in the
        daemon's name.

        Args:
            env: the environment of this process.
            pid: id of this process: a watchdog for another process is ignored.
        """
        address = env.pop("NOTIFY_SOCKET", "") or None
        watchdog_us = env.pop("WATCHDOG_USEC", "")
        watched_pid = env.pop("WATCHDOG_PID", "")
        is_watched = watched_pid in ("", str(pid))
        if is_watched and watchdog_us.isdecimal() and int(watchdog_us) > 0:
            return cls(address, watchdog_s=int(watchdog_us) / 1e6)
        return cls(address)

    async def notify(self, **fields: object) -> None:
        """Send one message, with these fields, if there is a manager.

        The first failure of an outage is logged: it explains why the manager may stop the daemon.
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
            if not self._is_unreachable:
                log.warning(
                    "cannot notify the service manager",
                    socket=self._address,
                    cause=str(exn),
                    what=[*fields],
                )
            self._is_unreachable = True
        else:
            self._is_unreachable = False

    async def watch(self, current_liveness: Callable[[], Liveness]) -> None:
        """Send the status line, and a watchdog ping while the daemon is alive, until cancelled."""
        if self._address is None:
            return
        while True:
            current = current_liveness()
            fields: dict[str, object] = {"STATUS": current.line}
            if current.alive:
                fields["WATCHDOG"] = 1
            await self.notify(**fields)
            await asyncio.sleep(self._period_s)

    async def keep_alive_during(self, status_line: str, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread, and ask the manager for more time until it returns.

        After `_MAX_WORK_S`, the daemon asks for no more time, and the manager may end it.

        Args:
            status_line: the daemon's status during the call.
            call: the blocking call, whose result is returned.
        """
        work = asyncio.get_running_loop().run_in_executor(None, call)
        for _ in range(int(_MAX_WORK_S / self._period_s)):
            await asyncio.wait([work], timeout=self._period_s)
            if work.done():
                break
            await self.ask_for_time(_MORE_TIME_S, STATUS=status_line)
        return await work

    async def ask_for_time(self, more_s: float, **fields: object) -> None:
        """Ask the manager to let the current start or stop take `more_s` from now on.

        Args:
            fields: further fields of the message.
        """
        await self.notify(**fields, EXTEND_TIMEOUT_USEC=int(more_s * 1e6))


def _message(fields: Mapping[str, object]) -> bytes:
    """Return the bytes of a message, which has one field per line."""
    lines = []
    for name, value in fields.items():
        words = str(value).split()  # a line break would begin another field
        lines.append(f"{name}={' '.join(words)}")
    return "\n".join(lines).encode()
