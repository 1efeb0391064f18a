"""The view of `shardcache top`: frames, lines of JSON, or a screen until q is pressed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from shardcache.cli.admin_client import AdminClient
from shardcache.cli.common import print_json
from shardcache.cli.event_loop import in_thread, on_key
from shardcache.cli.frame import Moment, frame, rates_between
from shardcache.cli.output import make_console
from shardcache.errors import DaemonError

_ANSWER_LIMIT_S = 10.0


async def show_node(interval_s: float, once: bool, as_json: bool, socket: Path | None) -> None:
    """Show the daemon at `socket` until q is pressed; one frame if `once`, or if the output is not a terminal.

    Raises DaemonError if it does not answer.
    """
    console = make_console()
    async with aclosing(_watch(AdminClient(socket, _ANSWER_LIMIT_S), interval_s)) as moments:
        if once or not (as_json or console.is_terminal):
            _print_moment(await _first_with_rates(moments), console, as_json)
        elif as_json:
            await _print_lines(moments)
        else:
            await _show_until_q(moments, console)


async def _watch(daemon: AdminClient, interval_s: float) -> AsyncGenerator[Moment, None]:
    """Yield a moment now and after each interval, even while the daemon is down.

    Raises DaemonError if it is down at the start.
    """
    page = await in_thread(daemon.status)
    yield Moment(page)
    while True:
        await asyncio.sleep(interval_s)
        try:
            former, page = page, await in_thread(daemon.status)
        except DaemonError as exn:
            yield Moment(page, trouble=exn)
        else:
            yield Moment(page, rates_between(former, page))


async def _first_with_rates(moments: AsyncIterator[Moment]) -> Moment:
    while True:
        moment = await anext(moments)
        if moment.trouble:
            raise moment.trouble
        if moment.rates:
            return moment


def _print_moment(moment: Moment, console: Console, as_json: bool) -> None:
    if as_json:
        print_json(moment.to_json())
    else:
        console.print(frame(moment, console.width))


async def _print_lines(moments: AsyncIterator[Moment]) -> None:
    async for moment in moments:
        if moment.rates or moment.trouble:
            print_json(moment.to_json())


async def _show_until_q(moments: AsyncIterator[Moment], console: Console) -> None:
    try:
        async with asyncio.timeout(None) as limit:  # pressing the key makes it expire
            end = partial(limit.reschedule, 0.0)
            with Live(console=console, screen=True, auto_refresh=False) as live, on_key("q", end):
                async for moment in moments:
                    live.update(frame(moment, console.width, console.height), refresh=True)
    except TimeoutError:
        if not limit.expired():
            raise
