"""The daemon's HTTP server: sessions and admin API over one socket."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import WSCloseCode, web

from shardcache.cache.facade import Cache
from shardcache.protocol import SESSION_PATH
from shardcache.server.admin import STARTED_AT_S, errors_as_json, routes
from shardcache.server.session import CACHE, SESSIONS, handle_session

_DRAIN_S = 5.0


def make_app(cache: Cache) -> web.Application:
    """Return the application that serves a cache."""
    app = web.Application(middlewares=[errors_as_json])
    app[CACHE] = cache
    app[SESSIONS] = set()
    app[STARTED_AT_S] = time.monotonic()
    app.add_routes(routes)
    app.router.add_get(SESSION_PATH, handle_session)
    app.on_shutdown.append(_say_goodbye)
    return app


@asynccontextmanager
async def serving(cache: Cache, sock: socket.socket) -> AsyncIterator[None]:
    """Serve on a listening socket until the block is left; then let every answer under way out."""
    runner = web.AppRunner(make_app(cache), access_log=None, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        yield
    finally:
        await runner.cleanup()


async def _say_goodbye(app: web.Application) -> None:
    async with asyncio.TaskGroup() as closing:
        for session in app[SESSIONS].copy():
            closing.create_task(session.close(code=WSCloseCode.GOING_AWAY, message=b"the daemon stops"))
