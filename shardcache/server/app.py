"""The daemon's HTTP server: sessions and the admin API over one socket."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from shardcache.cache.facade import Cache
from shardcache.protocol import SESSION_PATH
from shardcache.server.admin import LOOP_LAG, STARTED_AT_S, errors_as_json, routes
from shardcache.server.audit import AUDIT, Audit, audit
from shardcache.server.connection_limit import LIMITS, Acceptor, Limits
from shardcache.server.dashboard import LIVE, LIVE_PATH, STATIC_PATH, Files, Live, live
from shardcache.server.drain import DRAIN, Drain, refuse_new_work
from shardcache.server.load import LoopLag
from shardcache.server.metrics import add_metrics
from shardcache.server.session import CACHE, handle_session
from shardcache.server.tcp import LISTENER, Listener, guard, harden, serving_tcp

# Grace period of connections that are still open after the drain.
_CLOSE_S = 0.5


def make_app(cache: Cache, limits: Callable[[], Limits], listener: Listener | None = None) -> web.Application:
    """Return the web application that serves a cache."""
    app = web.Application(middlewares=[errors_as_json, guard, audit, refuse_new_work])
    app[CACHE] = cache
    app[LIMITS] = limits
    app[AUDIT] = Audit()
    if listener is not None:
        app[LISTENER] = listener
    app[DRAIN] = Drain()
    app[STARTED_AT_S] = time.monotonic()
    app[LOOP_LAG] = LoopLag()
    app.on_response_prepare.append(harden)
    app.add_routes(routes)
    add_metrics(app)
    app.router.add_get(SESSION_PATH, handle_session)
    _add_dashboard(app)
    app.cleanup_ctx.append(_measuring)
    return app


def _add_dashboard(app: web.Application) -> None:
    page = Files()
    app[LIVE] = Live(app[CACHE])
    app.router.add_get("/", page.page)
    app.router.add_get(STATIC_PATH + "{version}/{name}", page.static)
    app.router.add_get(LIVE_PATH, live)


@asynccontextmanager
async def serving(
    cache: Cache, sock: socket.socket, limits: Callable[[], Limits], listener: Listener | None = None
) -> AsyncIterator[Drain]:
    """Serve on a listening socket, and over TCP if there is a listener, until the block exits.

    `limits` returns those of the socket. Yields the Drain, which lets requests in progress finish; after that, the
    socket still answers health and status.
    """
    app = make_app(cache, limits, listener)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    assert runner.server is not None
    try:
        with Acceptor(runner.server, limits).accepting(sock), serving_tcp(runner, listener):
            yield app[DRAIN]
    finally:
        await runner.cleanup()


async def _measuring(app: web.Application) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(app[LOOP_LAG].run(), name="loop lag")
        yield
        task.cancel()
