"""Stopping in good order: what is under way may end, what is new is refused, and everyone is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from aiohttp import WSCloseCode, web

from shardcache.errors import StoppingError

# Who asked is answered within this, or asks the next daemon; a reader that is busy, or frozen, hears no goodbye.
_LIMIT_S = 3.0


class Drain:
    """What is under way in a server, and whether it stops.

    Attributes:
        began: whether the daemon was told to stop.
        sessions: of connected readers.
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
        """Count a request that is waited for when the daemon stops. Raises StoppingError when it does already."""
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
        """Say goodbye to the readers, wait for what was asked for before, and end what takes too long."""
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
    """Let a daemon that stops take on nothing more; it still says how it is."""
    if request.method == "GET" and "Upgrade" not in request.headers:
        return await handler(request)
    try:
        with request.app[DRAIN].errand():
            return await handler(request)
    except StoppingError as exn:
        return web.json_response({"error": exn.to_json()}, status=503)
