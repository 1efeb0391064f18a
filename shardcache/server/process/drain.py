"""The running requests and sessions of a server, and their end.

To drain is to refuse new requests, close the sessions, and let running requests finish before the
daemon exits. `running` also uses the drain to find out whether the daemon is idle.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import WSCloseCode, web

from shardcache.shared.exceptions import StoppingError

# Requests that take longer than this at shutdown are cancelled; clients send them again to the next
# daemon. There has to be a limit, because busy or frozen readers do not answer the close handshake.
_DRAIN_LIMIT_S = 3.0


class Drain:
    """The running requests and sessions of a server, and its shutdown.

    Attributes:
        has_begun: True once the daemon is shutting down.
        sessions: the connected readers' WebSockets.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.sessions: set[web.WebSocketResponse] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # Time by the monotonic clock at which the latest session or request ended.
        self._last_end_s = time.monotonic()

    @contextmanager
    def running_request(self) -> Iterator[None]:
        """Track the request or session that the current task handles, during the block.

        Shutdown waits for the block, and cancels the task if the block takes too long.

        Raises StoppingError if the daemon is already stopping.
        """
        if self.has_begun:
            raise StoppingError("the daemon is stopping")
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._requests.remove(task)
            self._last_end_s = time.monotonic()
            if not self._requests:
                self._idle.set()

    async def wait_until_idle(self, idle_s: float) -> None:
        """Wait until no session or request that changes something has run for `idle_s` seconds."""
        while True:
            await self._idle.wait()
            last_end_s = self._last_end_s
            await asyncio.sleep(last_end_s + idle_s - time.monotonic())
            # A request may have begun and ended, or only begun, during the sleep.
            has_one_ended = self._last_end_s != last_end_s
            if not has_one_ended and not self._requests:
                return

    async def run(self) -> None:
        """Close the sessions, and wait for running requests; cancel requests that take too long."""
        self.has_begun = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_LIMIT_S):
                await self._close_sessions()
                await self._idle.wait()

        for task in self._requests:
            task.cancel()
        await self._idle.wait()

    async def _close_sessions(self) -> None:
        """Close all sessions concurrently, with the code that sends clients to the next daemon."""
        async with asyncio.TaskGroup() as group:
            for session in self.sessions.copy():
                close = session.close(code=WSCloseCode.GOING_AWAY, message=b"stopping")
                group.create_task(close)
