"""`shardcache top`: live view of this node's daemon."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from shardcache.cli.commands.status import print_nodes
from shardcache.cli.common import json_option, nodes_options, print_json, socket_option
from shardcache.errors import DaemonError, NoDaemonError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from shardcache.cli.admin_client import AdminClient
    from shardcache.cli.display.frame import Moment
    from shardcache.cli.display.rates import Page
    from shardcache.cli.nodes import Nodes, NodeState

T = TypeVar("T")

_ANSWER_LIMIT_S = 10.0
_SHORTEST_INTERVAL_S = 0.1


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=_SHORTEST_INTERVAL_S),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates.",
)
@click.option("--once", is_flag=True, help="Show one frame, with the rates of one interval, and exit.")
@nodes_options
@json_option
@socket_option
def top(
    interval_s: float,
    once: bool,
    nodes: tuple[str, ...],
    token_file: Path | None,
    as_json: bool,
    socket: Path | None,
) -> None:
    """Show the cache, jobs and transfers live.

    Press q or Ctrl-C to quit. If the output is not a terminal, prints one frame, as with --once. With --json, prints
    one line of JSON per interval: the status page and its "rates", or "error" while no daemon answers.

    With --nodes, shows a line for each of several nodes, and their totals; with --once, then exits 1 if a node does not
    answer, and 3 if none does.
    """
    if nodes and (once or not (as_json or sys.stdout.isatty())):
        print_nodes(nodes, token_file, interval_s, as_json=as_json, with_rates=True)
    elif nodes:
        asyncio.run(_top_of_nodes(nodes, token_file, interval_s, as_json))
    else:
        asyncio.run(_top(interval_s, once, as_json, socket))


async def _top(interval_s: float, once: bool, as_json: bool, socket: Path | None) -> None:
    from shardcache.cli.admin_client import AdminClient
    from shardcache.cli.display.frame import frame
    from shardcache.cli.display.output import make_console

    console = make_console()
    async with AdminClient(socket) as daemon, aclosing(_watch(daemon, interval_s)) as moments:
        if once or not (as_json or console.is_terminal):
            _print_moment(await _first_with_rates(moments), console, as_json)
        elif as_json:
            await _print_lines(moments)
        else:
            await _show_until_q(moments, console, lambda moment: frame(moment, console.width, console.height))


async def _watch(daemon: AdminClient, interval_s: float) -> AsyncGenerator[Moment, None]:
    """Yield a moment now and after each interval, even while the daemon is down.

    Raises DaemonError if it is down at the start.
    """
    from shardcache.cli.display.frame import Moment
    from shardcache.cli.display.rates import rates_between

    page = await _look(daemon)
    yield Moment(page)
    while True:
        await asyncio.sleep(interval_s)
        try:
            former, page = page, await _look(daemon)
        except DaemonError as exn:
            yield Moment(page, trouble=exn)
        else:
            yield Moment(page, rates_between(former, page))


async def _look(daemon: AdminClient) -> Page:
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            return await daemon.status()
    except TimeoutError as exn:
        raise NoDaemonError(f"the daemon has not responded for {_ANSWER_LIMIT_S:g} s", url=str(daemon.socket)) from exn


async def _first_with_rates(moments: AsyncIterator[Moment]) -> Moment:
    while True:
        moment = await anext(moments)
        if moment.trouble:
            raise moment.trouble
        if moment.rates:
            return moment


def _print_moment(moment: Moment, console: Console, as_json: bool) -> None:
    from shardcache.cli.display.frame import frame

    if as_json:
        print_json(moment.to_json())
    else:
        console.print(frame(moment, console.width))


async def _print_lines(moments: AsyncIterator[Moment]) -> None:
    async for moment in moments:
        if moment.rates or moment.trouble:
            print_json(moment.to_json())


async def _top_of_nodes(names: tuple[str, ...], token_file: Path | None, interval_s: float, as_json: bool) -> None:
    from shardcache.cli.display.nodes_frame import nodes_frame, nodes_json
    from shardcache.cli.display.output import make_console
    from shardcache.cli.nodes import Node, Nodes, read_token

    console = make_console()
    async with (
        Nodes(list(map(Node.parse, names)), read_token(token_file), interval_s) as nodes,
        aclosing(_every(interval_s, nodes)) as moments,
    ):
        if as_json:
            async for states in moments:
                print_json(nodes_json(states))
        else:
            await _show_until_q(moments, console, lambda states: nodes_frame(states, console.height))


async def _every(interval_s: float, nodes: Nodes) -> AsyncGenerator[list[NodeState], None]:
    """Yield the nodes' states after each interval; those of nodes that have not answered yet, too."""
    with suppress(TimeoutError):
        async with asyncio.timeout(interval_s):
            await nodes.known(with_rates=False)
    while True:
        yield nodes.states
        await asyncio.sleep(interval_s)


async def _show_until_q(moments: AsyncIterator[T], console: Console, draw: Callable[[T], RenderableType]) -> None:
    from rich.live import Live

    from shardcache.cli.display.keys import on_key

    try:
        async with asyncio.timeout(None) as limit:  # pressing the key makes it expire
            end = partial(limit.reschedule, 0.0)
            with Live(console=console, screen=True, auto_refresh=False) as live, on_key("q", end):
                async for moment in moments:
                    live.update(draw(moment), refresh=True)
    except TimeoutError:
        if not limit.expired():
            raise
