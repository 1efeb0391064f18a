"""The screen of `shardcache top`: the status page, drawn at an interval until q is pressed.

A moment is the data of one frame: a status page, and the rates since the previous page.
"""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from shardcache.cli.admin_client import AdminClient
from shardcache.cli.common import in_thread, make_console, print_json
from shardcache.cli.monitoring.moment import Moment, rates_between
from shardcache.cli.monitoring.status_text import draw
from shardcache.errors import DaemonError

_MAX_KEY_BYTES = 64


async def show_node(
    socket: Path | None,
    interval_s: float,
    *,
    once: bool,
    as_json: bool,
) -> None:
    """Show the daemon at `socket` until q is pressed. Raises DaemonError if it does not answer.

    Args:
        socket: path of the daemon's socket; None for the default socket.
        interval_s: interval between frames.
        once: True to show only one frame. Without a terminal, only one is shown in any case, unless
            `as_json`.
        as_json: True to print each frame's data as a line of JSON.
    """
    console = make_console()
    can_repeat = as_json or console.is_terminal
    is_single = once or not can_repeat
    async with aclosing(_watch(AdminClient(socket), interval_s)) as moments:
        if not is_single and not as_json:
            await _show_until_q(moments, console)
            return
        async for moment in moments:
            if is_single and moment.trouble:
                raise moment.trouble
            # The first page of a daemon has no rates, so it is not shown.
            if moment.rates is None and moment.trouble is None:
                continue
            if as_json:
                print_json(moment.to_json())
            else:
                console.print(draw(moment, console.width))
            if is_single:
                return


async def _watch(daemon: AdminClient, interval_s: float) -> AsyncGenerator[Moment, None]:
    """Yield a moment now and after each interval, even while the daemon is down.

    Raises DaemonError if the daemon is down at the start.
    """
    page = await in_thread(daemon.status)
    yield Moment(page)
    while True:
        await asyncio.sleep(interval_s)
        try:
            previous = page
            page = await in_thread(daemon.status)
        except DaemonError as exn:
            yield Moment(page, trouble=exn)
        else:
            yield Moment(page, rates_between(previous, page))


async def _show_until_q(moments: AsyncIterator[Moment], console: Console) -> None:
    """Draw each moment until q is pressed."""
    try:
        # The time-out has no time at first. Pressing q sets it to a time that has passed, which
        # ends the loop.
        async with asyncio.timeout(None) as limit:
            expire = partial(limit.reschedule, 0.0)
            with (
                Live(console=console, screen=True, auto_refresh=False) as live,
                _on_q(expire),
            ):
                async for moment in moments:
                    live.update(draw(moment, console.width, console.height), refresh=True)
    except TimeoutError:
        if not limit.expired():
            raise


@contextmanager
def _on_q(action: Callable[[], object]) -> Iterator[None]:
    """During the block, call `action` when q is pressed, or the terminal hangs up.

    Nothing is done if standard input is not a terminal. Ctrl-C works as usual.
    """
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    settings = termios.tcgetattr(fd)

    def read_keys() -> None:
        keys = os.read(fd, _MAX_KEY_BYTES)
        if not keys or b"q" in keys:
            action()

    tty.setcbreak(fd)
    loop.add_reader(fd, read_keys)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)
