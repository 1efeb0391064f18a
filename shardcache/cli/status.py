"""Commands that look at the daemon.

`status`, `top`, `probe`, and `dashboard`, bridged from a loopback port.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.errors import ConfigError, DaemonError, NoDaemonError
from shardcache.private import tool_socket
from shardcache.protocol import socket_path
from shardcache.unix_socket import health

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web


@common.examples("status", "status --json")
@click.command()
@common.query_options
def status(as_json: bool, socket: Path | None) -> None:
    """Show the daemon's cache, counters, transfers and jobs."""
    page = AdminClient(socket).status()
    if as_json:
        common.print_json(page)
    else:
        from shardcache.cli.status_text import Moment, draw

        console = common.make_console()
        console.print(draw(Moment(page), console.width))


@common.examples("top", "top --once --interval 5")
@click.command(context_settings={"show_default": True})
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1),
    default=1.0,
    help="Seconds between updates.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Show one frame, with the rates of one interval, and exit.",
)
@common.query_options
def top(interval_s: float, once: bool, as_json: bool, socket: Path | None) -> None:
    """Show the cache, jobs and transfers live.

    Press q or Ctrl-C to quit. If the output is not a terminal, prints one frame, as with --once.
    With --json, prints one line of JSON per interval: the status page and its "rates", or "error"
    while no daemon answers.
    """
    import asyncio

    from shardcache.cli.top_screen import show_node

    asyncio.run(show_node(interval_s, once, as_json, socket))


# Whether the daemon is started, ready and alive

# The health states in which each probe passes. None depends on an origin.
PASSES = {
    "startup": frozenset({"ok", "degraded"}),  # the daemon has started to serve
    # it is fully functional: its disk is healthy, and it is not stopping
    "ready": frozenset({"ok"}),
    # it answers; a restart would fix neither disk nor origin
    "live": frozenset({"ok", "degraded", "draining"}),
}
LIMIT_S = 5.0
# A full or broken disk still responds; a restart may help only with one that hangs. As in
# server/service_notifier.py.
HUNG_S = 120.0
_SECONDS = click.FloatRange(min=0)
_PAUSE_S = 0.2


def ask(path: Path | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the health that the daemon reports; `limit_s` limits each step of the exchange.

    Raises NoDaemonError if nothing answers in that time, DaemonError if this user may not ask or
    something else answers.
    """
    where = socket_path(path)
    try:
        return health(where, limit_s)
    except TimeoutError:
        raise NoDaemonError(f"no answer within {limit_s:g} s", url=str(where)) from None
    except PermissionError:
        raise DaemonError("this user may not use the daemon's socket", url=str(where)) from None
    except OSError as exn:
        raise NoDaemonError(f"no daemon answers: {exn.strerror or exn}", url=str(where)) from None
    except ValueError:
        raise DaemonError(
            "the server at the socket is not a shardcache daemon",
            url=str(where),
        ) from None


def passes(what: str, found: dict[str, Any]) -> bool:
    """Return True if a daemon of this health passes the probe."""
    hangs = what == "live" and found.get("disk", {}).get("silent_s", 0.0) > HUNG_S
    return found["status"] in PASSES[what] and not hangs


@common.examples("probe ready --wait-s 60", "probe live")
@click.command()
@click.argument("what", type=click.Choice(list(PASSES)))
@click.option(
    "--timeout-s",
    type=_SECONDS,
    default=LIMIT_S,
    show_default=True,
    help="Time limit for an answer.",
)
@click.option(
    "--wait-s",
    type=_SECONDS,
    default=0.0,
    help="Keep asking until it passes.  [default: ask once]",
)
@common.query_options
def probe(what: str, timeout_s: float, wait_s: float, as_json: bool, socket: Path | None) -> None:
    """Exit 0 if the daemon passes the probe, 1 if it does not, 3 if no daemon answers.

    startup: the daemon has started to serve. ready: its disk is healthy, and it is not stopping.
    live: it answers, and its disk does not hang. None of the probes depends on an object store.
    """
    found = _ask_until(what, socket, timeout_s, time.monotonic() + wait_s)
    if as_json:
        common.print_json(found)
    else:
        click.echo(found["status"])
    if not passes(what, found):
        common.fail()


def _ask_until(
    what: str,
    socket: Path | None,
    timeout_s: float,
    deadline_s: float,
) -> dict[str, Any]:
    """Return the first answer that passes the probe, or the one at the deadline.

    Then raises as `ask` does.
    """
    while time.monotonic() < deadline_s:
        with suppress(NoDaemonError):
            found = ask(socket, timeout_s)
            if passes(what, found):
                return found
        time.sleep(_PAUSE_S)  # polling: nothing signals a daemon's start
    return ask(socket, timeout_s)


# The dashboard, for every user of the socket

_DESKTOP = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
_HOST = "127.0.0.1"
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


@common.examples("dashboard", "dashboard --no-open --port 9301")
@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1.  [default: a free one]",
)
@click.option("--open/--no-open", "to_open", default=True, help="Open the page in a local browser.")
@common.query_options
def dashboard(port: int, to_open: bool, as_json: bool, socket: Path | None) -> None:
    """Show the dashboard in a browser, until Ctrl-C.

    The page is served on this machine only, at the printed url, whose token is required. It shows
    what you may see and is read-only. From another machine, forward the port:

    ssh -L 9301:127.0.0.1:9301 NODE shardcache dashboard --no-open --port 9301
    """
    import asyncio

    AdminClient(socket).status()  # raises, with a remedy, if no daemon answers
    asyncio.run(
        _serve(tool_socket(socket), port, to_open and any(map(os.environ.get, _DESKTOP)), as_json),
    )


async def _serve(socket: Path, port: int, to_open: bool, as_json: bool) -> None:
    import asyncio

    async with _bridge(socket, port) as url:
        if as_json:
            common.print_json({"url": url, "socket": str(socket)})
        else:
            click.echo(f"Dashboard of {socket}:\n\n    {url}\n\nPress Ctrl-C to stop.")
        # The browser gets a file that leads to the url: every user can read its command line, token
        # included.
        with TemporaryDirectory(prefix="shardcache-dashboard-") as folder:
            if to_open:
                import webbrowser

                page = "<!doctype html><title>shardcache</title>"
                door = Path(folder) / "dashboard.html"
                door.write_text(f'{page}<meta http-equiv="refresh" content="0; url={url}">')
                await asyncio.to_thread(webbrowser.open, door.as_uri())
            await asyncio.Event().wait()


@asynccontextmanager
async def _bridge(socket: Path, port: int) -> AsyncIterator[str]:
    """Serve the dashboard of the daemon at `socket` until the block exits.

    Yield its url, token included.

    Raises ConfigError for a port in use.
    """
    import aiohttp
    from aiohttp import web

    token = secrets.token_urlsafe(24)
    connector = aiohttp.UnixConnector(str(socket), limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)  # the live updates have no end
    async with aiohttp.ClientSession(
        "http://shardcache",
        connector=connector,
        timeout=timeout,
    ) as daemon:
        runner = web.AppRunner(_make_app(daemon, token), access_log=None, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, _HOST, port).start()
            except OSError as exn:
                reason = f"cannot listen on {_HOST}:{port}: {exn.strerror}"
                raise ConfigError(reason, remedy="choose another --port") from exn
            # In the fragment, which browsers never send: the page reads the token there and sends
            # it in a header.
            yield f"http://{_HOST}:{runner.addresses[0][1]}/#token={token}"
        finally:
            await runner.cleanup()


def _make_app(daemon: aiohttp.ClientSession, token: str) -> web.Application:
    from aiohttp import web

    async def live(request: web.Request) -> web.StreamResponse:
        brought = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(brought, f"Bearer {token}".encode()):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return await _pass_on(daemon, request)

    app = web.Application()
    page = partial(_pass_on, daemon)
    app.router.add_get("/", page)
    app.router.add_get("/dashboard/static/{version}/{name}", page)
    app.router.add_get("/dashboard/live", live)
    return app


async def _pass_on(daemon: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
    """Stream the daemon's answer through; 502 if there is none."""
    import aiohttp
    from aiohttp import web

    tags = {}
    if "If-None-Match" in request.headers:
        tags["If-None-Match"] = request.headers["If-None-Match"]
    response = web.StreamResponse()
    try:
        async with daemon.get(request.rel_url, headers=tags) as answer:
            response.set_status(answer.status)
            for name in _PASSED_ON:
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
    except (aiohttp.ClientError, ConnectionError):
        if not response.prepared:
            return web.Response(status=502, text="the daemon does not answer")
    return response
