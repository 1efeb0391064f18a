"""Graceful shutdown: running requests may finish, new ones are refused, and readers are notified."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from aiohttp import WSCloseCode, web

from shardcache.errors import StoppingError

# Longer requests must be sent to the next daemon again; busy or frozen readers do not answer the close handshake.
_LIMIT_S = 3.0


class Drain:
    """The running requests and sessions of a server, and its shutdown.

    Attributes:
        began: True once the daemon is shutting down.
        sessions: the connected readers' WebSockets.
    """

    def __init__(self) -> None:
        self.began = False
        self.sessions: set[web.WebSocketResponse] = set()
        self._errands: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()

    def __repr__(self) -> str:
        return f"Drain(began={self.began}, sessions={len(self.sessions)}, errands={len(self._errands)})"

    @contextmanager
    def errand(self) -> Iterator[None]:
        """Track a request that shutdown waits for. Raises StoppingError if the daemon is already stopping."""
        if self.began:
            raise StoppingError("the daemon is stopping")
        task = asyncio.current_task()
        assert task is not None
        self._errands.add(task)
        try:
            yield
        finally:
            self._errands.remove(task)
            self._settle()

    async def run(self) -> None:
        """Close the readers' sessions, wait for running requests, and cancel those that take too long."""
        self.began = True
        self._settle()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT_S):
                async with asyncio.TaskGroup() as closing:
                    for session in self.sessions.copy():
                        closing.create_task(session.close(code=WSCloseCode.GOING_AWAY, message=b"stopping"))
                await self._idle.wait()
        for task in self._errands:
            task.cancel()
        await self._idle.wait()

    def _settle(self) -> None:
        if self.began and not self._errands:
            self._idle.set()


DRAIN = web.AppKey("DRAIN", Drain)


@web.middleware
async def refuse_new_work(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse new work while the daemon stops; it still answers GET requests."""
    if request.method == "GET" and "Upgrade" not in request.headers:
        return await handler(request)
    try:
        with request.app[DRAIN].errand():
            return await handler(request)
    except StoppingError as exn:
        return web.json_response({"error": exn.to_json()}, status=503)
