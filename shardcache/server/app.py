"""The daemon's HTTP server.

On Unix sockets, it serves everything: readers' sessions, the admin API, metrics and the dashboard.
Over TCP, it serves only pages that change nothing, such as the status. The composition root
(`daemon.running`) starts it. To drain is to let requests finish before the daemon exits.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager

from aiohttp import web

from shardcache.cache.facade import Cache
from shardcache.server import api, dashboard
from shardcache.server.listening.acceptor import Acceptor
from shardcache.server.listening.limits import Limits
from shardcache.server.listening.s3_listener import S3Options
from shardcache.server.listening.tcp_listener import TCP_LIMITS, TcpListener
from shardcache.server.peer import peer_of
from shardcache.server.process.drain import Drain
from shardcache.server.service import SERVICE, Service
from shardcache.server.session_start import handle_session
from shardcache.server.tcp_guard import TOKEN_HASH, guard, harden
from shardcache.shared.protocol import SESSION_PATH

# Time that connections have to finish their requests if they are still open after the drain.
_CLOSE_S = 0.5
_NO_S3 = S3Options()


@asynccontextmanager
async def serving(
    cache: Cache,
    socks: Sequence[socket.socket],
    limits: Callable[[], Limits],
    listener: TcpListener,
    s3: S3Options = _NO_S3,
) -> AsyncIterator[Drain]:
    """Serve on Unix sockets, over TCP, and for S3 clients, until the block exits.

    Yields the Drain, which the caller runs before the block exits. Once it runs, the sockets answer
    only requests that change nothing, such as those for health and status.

    Args:
        cache: the cache that is served.
        socks: listening Unix sockets.
        limits: returns the present limits of connections to these sockets.
        listener: listening TCP sockets, for requests that change nothing.
        s3: options of the S3 endpoint.
    """
    service = Service(cache, limits, s3.address)
    async with (
        _serving_s3(cache, service.drain, s3) as key_handler,
        _serving_sockets(service, socks, listener, key_handler),
    ):
        yield service.drain


@asynccontextmanager
async def _serving_s3(
    cache: Cache,
    drain: Drain,
    options: S3Options,
) -> AsyncIterator[api.Handler]:
    """Serve S3 clients if there is an endpoint; yield the handler of requests for its keys.

    Users send these requests to the Unix socket.
    """
    if not options.sockets:
        yield api.no_endpoint
        return
    # The import is here to save time: a reader waits for the start of its private daemon, which has
    # no endpoint.
    from shardcache.server.s3.serving import serving_s3

    async with serving_s3(cache, drain, options) as key_handler:
        yield key_handler


@asynccontextmanager
async def _serving_sockets(
    service: Service,
    socks: Sequence[socket.socket],
    listener: TcpListener,
    key_handler: api.Handler,
) -> AsyncIterator[None]:
    """Serve on Unix sockets and over TCP, until the block exits.

    Args:
        key_handler: handles requests for keys to the S3 endpoint.
    """
    app = _application(service, listener.token_hash)
    app.router.add_post("/v1/credentials", key_handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    assert runner.server is not None
    unix_acceptor = Acceptor(runner.server, service.limits)
    tcp_acceptor = Acceptor(runner.server, lambda: TCP_LIMITS)
    try:
        with ExitStack() as accepting:
            for sock in socks:
                accepting.enter_context(unix_acceptor.accepting(sock))
            for sock in listener.sockets:
                accepting.enter_context(tcp_acceptor.accepting(sock))
            yield
    finally:
        await runner.cleanup()
        service.metrics_writer.shutdown(wait=False)


def _application(service: Service, token_hash: bytes | None) -> web.Application:
    """Return the aiohttp application.

    Args:
        token_hash: hash of the token that TCP requests must carry; None if they need no token.
    """
    app = web.Application(middlewares=[api.errors_as_json, guard, _audit_and_track])
    app[SERVICE] = service
    app[TOKEN_HASH] = token_hash
    app.on_response_prepare.append(harden)
    app.add_routes(api.routes)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get(SESSION_PATH, handle_session)
    dashboard.add_to(app)
    app.cleanup_ctx.append(_measuring_loop_lag)
    return app


async def _measuring_loop_lag(app: web.Application) -> AsyncIterator[None]:
    """Measure the event loop's lag while the application runs."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(app[SERVICE].loop_lag.run(), name="loop lag")
        yield
        task.cancel()


async def _metrics(request: web.Request) -> web.Response:
    """Answer a request for `/metrics`."""
    # The import is here because it takes 25 ms, and not every daemon is scraped.
    from shardcache.server.metrics.prometheus import metrics

    return await metrics(request)


@web.middleware
async def _audit_and_track(request: web.Request, handler: api.Handler) -> web.StreamResponse:
    """Log requests that change something; track these requests, and sessions, until their end.

    Shutdown refuses new ones, and waits for those that are running. Other requests are always
    answered. `ReaderSession` writes sessions to the audit log.
    """
    service = request.app[SERVICE]
    is_change = request.method not in ("GET", "HEAD")
    is_session = "Upgrade" in request.headers  # a WebSocket, which begins with a GET
    if is_change:
        _, _, name = request.path.rpartition("/")
        service.audit.note("request", peer_of(request).uid, what=name)
    if not is_change and not is_session:
        return await handler(request)
    with service.drain.running_request():
        return await handler(request)
