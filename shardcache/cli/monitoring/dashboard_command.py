"""`shardcache dashboard`: the daemon's dashboard for a browser, over a loopback port.

Browsers cannot open Unix sockets. So the command runs a bridge, a small HTTP server on 127.0.0.1
that passes requests on to the daemon's socket. Every user who may use the socket can run the
command. Other users of the machine can reach the port, too, so the live data needs a token.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.private import tool_socket

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

# At least one of these variables is set if a browser can be opened.
_DESKTOP_VARIABLES = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
_HOST = "127.0.0.1"
# Headers of the daemon's answers that are passed on to the browser.
_PASSED_HEADERS = (
    "Content-Type",
    "Cache-Control",
    "ETag",
    "Content-Security-Policy",
    "Cross-Origin-Resource-Policy",
    "Referrer-Policy",
    "X-Content-Type-Options",
)
_TOKEN_BYTES = 24
_CONNECT_LIMIT_S = 10.0
# Time to wait, at the end, for connections that are still open, such as those of the live updates.
_CLOSE_LIMIT_S = 0.5


@common.examples("dashboard", "dashboard --no-open --port 9301")
@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1.  [default: a free one]",
)
@click.option(
    "--open/--no-open",
    "opens_browser",
    default=True,
    help="Open the page in a local browser.",
)
@common.query_options
def dashboard(port: int, opens_browser: bool, as_json: bool, socket: Path | None) -> None:
    """Show the dashboard in a browser, until Ctrl-C.

    Serves the page on this machine only, at a url with a token, which it prints. The page shows
    what you may see, and changes nothing. To see it from another machine, forward the port:

    ssh -L 9301:127.0.0.1:9301 NODE shardcache dashboard --no-open --port 9301
    """
    import asyncio

    AdminClient(socket).status()  # raises, with a remedy, if no daemon answers
    has_desktop = any(os.environ.get(name) for name in _DESKTOP_VARIABLES)
    opens_browser = opens_browser and has_desktop
    asyncio.run(_serve(tool_socket(socket), port, opens_browser=opens_browser, as_json=as_json))


async def _serve(socket: Path, port: int, *, opens_browser: bool, as_json: bool) -> None:
    """Serve the dashboard until Ctrl-C; print its url, and open it if `opens_browser`."""
    import asyncio

    async with _bridge(socket, port) as url:
        if as_json:
            common.print_json({"url": url, "socket": str(socket)})
        else:
            click.echo(f"Dashboard of {socket}:\n\n    {url}\n\nPress Ctrl-C to stop.")
        with TemporaryDirectory(prefix="shardcache-dashboard-") as folder:
            if opens_browser:
                await _open_browser(url, Path(folder))
            await asyncio.Event().wait()  # until Ctrl-C


async def _open_browser(url: str, folder: Path) -> None:
    """Open a file in a browser that leads to the url.

    The url itself would be on the browser's command line, which every user can read, and would show
    the token.
    """
    import asyncio
    import webbrowser

    page = folder / "dashboard.html"
    page.write_text(
        "<!doctype html><title>shardcache</title>"
        f'<meta http-equiv="refresh" content="0; url={url}">',
    )
    await asyncio.to_thread(webbrowser.open, page.as_uri())


@asynccontextmanager
async def _bridge(socket: Path, port: int) -> AsyncIterator[str]:
    """Serve the dashboard of the daemon at `socket` until the block exits.

    Yields the dashboard's url, which contains the token. Raises ConfigError for a port in use.
    """
    import aiohttp
    from aiohttp import web

    token = secrets.token_urlsafe(_TOKEN_BYTES)
    connector = aiohttp.UnixConnector(str(socket), limit=0)  # 0 allows any number of connections
    # There is no total time limit, since the answer with the live updates never ends.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_LIMIT_S)
    async with aiohttp.ClientSession(
        "http://shardcache",  # for the header Host only
        connector=connector,
        timeout=timeout,
    ) as daemon:
        runner = web.AppRunner(
            _make_app(daemon, token),
            access_log=None,
            shutdown_timeout=_CLOSE_LIMIT_S,
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, _HOST, port).start()
            except OSError as exn:
                raise ConfigError(
                    f"cannot listen on {_HOST}:{port}: {exn.strerror}",
                    remedy="choose another --port",
                ) from exn
            _, bound_port = runner.addresses[0]
            # The token is in the url's fragment, which browsers never send. The page reads the
            # token there, and sends it in a header.
            yield f"http://{_HOST}:{bound_port}/#token={token}"
        finally:
            await runner.cleanup()


def _make_app(daemon: aiohttp.ClientSession, token: str) -> web.Application:
    """Return the application that passes the dashboard's requests on to the daemon.

    Args:
        daemon: session for requests to the daemon.
        token: token that requests for the live updates must carry.
    """
    from aiohttp import web

    expected = f"Bearer {token}".encode()

    async def live(request: web.Request) -> web.StreamResponse:
        """Stream the live updates if the request carries the token.

        The page itself needs no token, as it has no data.
        """
        sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(sent, expected):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return await _pass_on(daemon, request)

    app = web.Application()
    pass_on = partial(_pass_on, daemon)
    app.router.add_get("/", pass_on)
    app.router.add_get("/dashboard/static/{version}/{name}", pass_on)
    app.router.add_get("/dashboard/live", live)
    return app


async def _pass_on(daemon: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
    """Stream the daemon's answer to the browser; the status is 502 if no daemon answers.

    If the daemon's answer breaks off, the browser's connection is aborted, so that the browser does
    not cache a part of a file as the whole.
    """
    import aiohttp
    from aiohttp import web

    conditions = {}  # headers with which the daemon may answer "not modified"
    if "If-None-Match" in request.headers:
        conditions["If-None-Match"] = request.headers["If-None-Match"]
    response = web.StreamResponse()
    try:
        async with daemon.get(request.rel_url, headers=conditions) as answer:
            response.set_status(answer.status)
            for name in _PASSED_HEADERS:
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
    except (aiohttp.ClientError, ConnectionError):
        if not response.prepared:
            return web.Response(status=502, text="the daemon does not answer")
        if request.transport is not None:
            request.transport.abort()
    return response
