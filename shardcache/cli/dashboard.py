"""`shardcache dashboard`: the dashboard in a browser, for every user of the socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from shardcache.cli.common import ask, json_option, print_json, socket_option
from shardcache.private import tool_socket

_DESKTOP = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1.  [default: a free one]")
@click.option("--open/--no-open", "to_open", default=True, help="Open the page in a local browser.")
@json_option
@socket_option
def dashboard(port: int, to_open: bool, as_json: bool, socket: Path | None) -> None:
    """Show the dashboard in a browser, until Ctrl-C.

    The page is served on this machine only, at the printed url, whose token is required. It shows what you may see and
    is read-only. From another machine, forward the port:

    ssh -L 9301:127.0.0.1:9301 NODE shardcache dashboard --no-open --port 9301
    """
    import asyncio

    ask(socket, lambda daemon: daemon.status())  # raises, with a remedy, if no daemon answers
    asyncio.run(_dashboard(port, to_open and any(map(os.environ.get, _DESKTOP)), as_json, tool_socket(socket)))


async def _dashboard(port: int, to_open: bool, as_json: bool, socket: Path) -> None:
    import asyncio

    from shardcache.cli.bridge import bridging

    async with bridging(socket, port) as url:
        if as_json:
            print_json({"url": url, "socket": str(socket)})
        else:
            click.echo(f"Dashboard of {socket}:\n\n    {url}\n\nPress Ctrl-C to stop.")
        with _doorway(url) as door:
            if to_open:
                import webbrowser

                await asyncio.to_thread(webbrowser.open, door.as_uri())
            await asyncio.Event().wait()


@contextmanager
def _doorway(url: str) -> Iterator[Path]:
    """Yield a file that redirects to the url: every user can read the browser's command line, token included."""
    with TemporaryDirectory(prefix="shardcache-dashboard-") as folder:
        door = Path(folder) / "dashboard.html"
        door.write_text(f'<!doctype html><title>shardcache</title><meta http-equiv="refresh" content="0; url={url}">')
        yield door
