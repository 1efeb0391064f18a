"""Bridge from a loopback port to the daemon's socket, for the dashboard only."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from shardcache.errors import ConfigError

_HOST = "127.0.0.1"
_LIVE_PATH = "/dashboard/live"
_PAGE_PATHS = ("/", "/dashboard/static/{version}/{name}")
_PASSED_ON = (
    "Content-Type",
    "Cache-Control",
    "ETag",
    "Content-Security-Policy",
    "Cross-Origin-Resource-Policy",
    "Referrer-Policy",
    "X-Content-Type-Options",
)
_CLOSE_S = 0.5
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)  # the live updates have no end


@asynccontextmanager
async def bridging(socket: Path, port: int) -> AsyncIterator[str]:
    """Serve the dashboard of the daemon at `socket` until the block exits; yield its url, token included.

    Raises ConfigError for a port in use.
    """
    token = secrets.token_urlsafe(24)
    connector = aiohttp.UnixConnector(str(socket), limit=0)
    async with aiohttp.ClientSession("http://shardcache", connector=connector, timeout=_TIMEOUT) as daemon:
        runner = web.AppRunner(_make_app(daemon, token), access_log=None, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        try:
            await _listen(runner, port)
            # In the fragment, which browsers never send: the page reads the token there and sends it in a header.
            yield f"http://{_HOST}:{runner.addresses[0][1]}/#token={token}"
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int) -> None:
    try:
        await web.TCPSite(runner, _HOST, port).start()
    except OSError as exn:
        raise ConfigError(f"cannot listen on {_HOST}:{port}: {exn.strerror}", remedy="choose another --port") from exn


def _make_app(daemon: aiohttp.ClientSession, token: str) -> web.Application:
    expected = f"Bearer {token}".encode()

    async def page(request: web.Request) -> web.StreamResponse:
        return await _pass_on(daemon, request)

    async def live(request: web.Request) -> web.StreamResponse:
        brought = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(brought, expected):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return await _pass_on(daemon, request)

    app = web.Application()
    for path in _PAGE_PATHS:
        app.router.add_get(path, page)
    app.router.add_get(_LIVE_PATH, live)
    return app


async def _pass_on(daemon: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
    """Stream the daemon's answer through; 502 if there is none."""
    tags = {name: request.headers[name] for name in ("If-None-Match",) if name in request.headers}
    response = web.StreamResponse()
    try:
        async with daemon.get(request.rel_url, headers=tags) as answer:
            response.set_status(answer.status)
            response.headers.update({name: answer.headers[name] for name in _PASSED_ON if name in answer.headers})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
    except (aiohttp.ClientError, ConnectionError):
        return response if response.prepared else web.Response(status=502, text="the daemon does not answer")
    return response
