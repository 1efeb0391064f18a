"""The screen of `shardcache top`: the daemon's status, drawn at an interval until q is pressed.

A `StatusFrame` is the data to draw at one time: a status page, and the rates since the previous
page.
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
from shardcache.cli.monitoring.status_frame import StatusFrame, rates_between
from shardcache.cli.monitoring.status_text import draw
from shardcache.shared.exceptions import DaemonError

_MAX_KEY_BYTES = 64


async def show_daemon(
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
        once: True to show one frame and return. This is so, too, if the output is neither JSON nor
            a terminal.
        as_json: True to print each frame as a line of JSON.
    """
    console = make_console()
    async with aclosing(_watch(AdminClient(socket), interval_s)) as frames:
        if as_json:
            await _print_json_frames(frames, once=once)
        elif once or not console.is_terminal:
            frame = await _next_with_rates(frames)
            console.print(draw(frame, console.width))
        else:
            await _show_until_q(frames, console)


async def _print_json_frames(frames: AsyncIterator[StatusFrame], *, once: bool) -> None:
    """Print each frame as a line of JSON, or only the first frame with rates if `once`."""
    if once:
        frame = await _next_with_rates(frames)
        print_json(frame.to_json())
        return
    async for frame in frames:
        # The first page of a daemon has no rates, so it is not shown.
        if frame.rates is not None or frame.error is not None:
            print_json(frame.to_json())


async def _next_with_rates(frames: AsyncIterator[StatusFrame]) -> StatusFrame:
    """Return the next frame that has rates. Raises DaemonError if the daemon does not answer."""
    async for frame in frames:
        if frame.error is not None:
            raise frame.error
        if frame.rates is not None:
            return frame
    raise AssertionError("the frames never end")


async def _watch(daemon: AdminClient, interval_s: float) -> AsyncGenerator[StatusFrame, None]:
    """Yield a frame now and after each interval, even while the daemon is down.

    Never ends. Raises DaemonError if the daemon is down at the start.
    """
    page = await in_thread(daemon.status)
    yield StatusFrame(page)
    while True:
        await asyncio.sleep(interval_s)
        try:
            previous = page
            page = await in_thread(daemon.status)
        except DaemonError as exn:
            yield StatusFrame(page, error=exn)
        else:
            yield StatusFrame(page, rates_between(previous, page))


async def _show_until_q(frames: AsyncIterator[StatusFrame], console: Console) -> None:
    """Draw each frame until q is pressed."""
    try:
        # The time-out is unlimited at first. Pressing q sets it to a time in the past, which ends
        # the loop.
        async with asyncio.timeout(None) as limit:
            expire = partial(limit.reschedule, 0.0)
            with (
                Live(console=console, screen=True, auto_refresh=False) as live,
                _on_q(expire),
            ):
                async for frame in frames:
                    live.update(draw(frame, console.width, console.height), refresh=True)
    except TimeoutError:
        if not limit.expired():  # a time-out of something else
            raise


@contextmanager
def _on_q(action: Callable[[], object]) -> Iterator[None]:
    """During the block, call `action` when q is pressed, or the terminal hangs up.

    Does nothing if standard input is not a terminal. Ctrl-C works as usual.
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
