"""Graceful shutdown, and the takeover from a previous daemon that is still stopping."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from aiohttp import WSCloseCode, web

from shardcache.errors import StoppingError
from shardcache.unix_socket import connected, credentials, health

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
        self._idle.set()
        self._used_s = time.monotonic()  # end of the latest session or request

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
            async with asyncio.timeout(_LIMIT_S):
                async with asyncio.TaskGroup() as closing:
                    for session in self.sessions.copy():
                        closing.create_task(session.close(code=WSCloseCode.GOING_AWAY, message=b"stopping"))
                await self._idle.wait()
        for task in self._errands:
            task.cancel()
        await self._idle.wait()


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


log = structlog.get_logger()

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
    try:
        if health(path, _ASK_TIMEOUT_S)["status"] != "draining":
            return None
        with connected(path, _ASK_TIMEOUT_S) as sock:
            return credentials(sock)[0] or None
    except (OSError, ValueError):
        return None  # no daemon, or something else: binding the socket reports it


async def _ended(pid: int) -> None:
    """Wait for a process that is not our child (pidfd_open(2)). Raises ProcessLookupError if there is none."""
    loop, ended, fd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    try:
        loop.add_reader(fd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
