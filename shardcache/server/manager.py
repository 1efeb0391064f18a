"""What a service manager is told of the daemon (sd_notify(3)): that it serves, that it lives, that it stops.

The protocol is one datagram of `NAME=value` lines to the socket that `$NOTIFY_SOCKET` names. systemd speaks it, and so
do podman, s6 and others; where there is no such socket, nobody is told.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, MutableMapping
from typing import Self, TypeVar

import structlog

from shardcache.server.standing import Standing

log = structlog.get_logger()

T = TypeVar("T")

_TELL_S = 10.0
# One lost ping, or one that comes late on a busy node, is no reason to end a daemon.
_PINGS_A_LIMIT = 3
# While something takes long, this much more time is asked for again and again, but not for ever.
_MORE_S = 30.0
_PATIENCE_S = 900.0


class Manager:
    """Who started this process and wants to know how it is.

    Args:
        address: of the manager's socket: a path, or an abstract name after an "@"; None where nobody wants to be told.
        watchdog_s: silence after which the manager ends the daemon, in seconds; None where it does not.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = address
        self._is_deaf = False
        self._period_s = _TELL_S if watchdog_s is None else min(_TELL_S, watchdog_s / _PINGS_A_LIMIT)

    def __repr__(self) -> str:
        return f"Manager({self._address!r}, every {self._period_s:g} s)"

    @classmethod
    def take(cls, env: MutableMapping[str, str], pid: int) -> Self:
        """Read what `env` says to the process `pid`, and take it out: no process that it starts may speak for it."""
        address, limit_us, watched = (env.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
        is_watched = limit_us.isdecimal() and int(limit_us) > 0 and watched in ("", str(pid))
        return cls(address or None, int(limit_us) / 1e6 if is_watched else None)

    async def tell(self, **fields: object) -> None:
        """Send one message. That a manager cannot be told is logged once: it will end the daemon in its own time."""
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
                log.warning("cannot tell the service manager", socket=self._address, cause=str(exn), what=[*fields])
            self._is_deaf = True
        else:
            self._is_deaf = False

    async def watch(self, standing: Callable[[], Standing]) -> None:
        """Tell how the daemon is until cancelled, and that it lives as long as it does."""
        while self._address is not None:
            now = standing()
            await self.tell(STATUS=now.line, **({"WATCHDOG": 1} if now.alive else {}))
            await asyncio.sleep(self._period_s)

    async def have_patience(self, doing: str, call: Callable[[], T]) -> T:
        """Run what blocks in a thread, and have the manager wait for it while it does, within reason."""
        work = asyncio.get_running_loop().run_in_executor(None, call)
        for _ in range(int(_PATIENCE_S / self._period_s)):
            await asyncio.wait([work], timeout=self._period_s)
            if work.done():
                break
            await self.ask_for_time(_MORE_S, STATUS=doing)
        return await work

    async def ask_for_time(self, limit_s: float, **fields: object) -> None:
        """Tell that what is under way, start or stop, may take so much longer than the manager expects."""
        await self.tell(**fields, EXTEND_TIMEOUT_USEC=int(limit_s * 1e6))
