"""`shardcache status`: the cache, counters, transfers and jobs of this node, or the figures of several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardcache.cli.common import FAILED, NO_DAEMON, ask, json_option, nodes_options, print_json, socket_option

if TYPE_CHECKING:
    from shardcache.cli.nodes import NodeState


@click.command()
@nodes_options
@json_option
@socket_option
def status(nodes: tuple[str, ...], token_file: Path | None, as_json: bool, socket: Path | None) -> None:
    """Show the daemon's cache, counters, transfers and jobs.

    With --nodes, shows a line for each of several nodes, and their totals; exits 1 if a node does not answer, and 3 if
    none does.
    """
    if nodes:
        print_nodes(nodes, token_file, as_json=as_json)
        return
    page = ask(socket, lambda daemon: daemon.status())
    if as_json:
        print_json(page)
    else:
        from shardcache.cli.display.output import make_console
        from shardcache.cli.display.page import show_page

        show_page(make_console(), page)


def print_nodes(
    names: tuple[str, ...],
    token_file: Path | None,
    interval_s: float = 1.0,
    *,
    as_json: bool,
    with_rates: bool = False,
) -> None:
    """Print a line for each node, with rates over an interval if wanted; end the command with the exit code."""
    import asyncio

    from shardcache.cli.display.nodes_frame import nodes_frame, nodes_json
    from shardcache.cli.display.output import make_console

    states = asyncio.run(_states(names, token_file, interval_s, with_rates=with_rates))
    if as_json:
        print_json(nodes_json(states))
    else:
        make_console().print(nodes_frame(states))
    if not all(state.is_up for state in states):
        click.get_current_context().exit(FAILED if any(state.is_up for state in states) else NO_DAEMON)


async def _states(
    names: tuple[str, ...], token_file: Path | None, interval_s: float, *, with_rates: bool
) -> list[NodeState]:
    from shardcache.cli.nodes import DaemonNode, Nodes, read_token

    async with Nodes(list(map(DaemonNode.parse, names)), read_token(token_file), interval_s) as nodes:
        await nodes.known(with_rates=with_rates)
        return nodes.states
