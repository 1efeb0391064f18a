"""`shardcache cluster status`: the tier's state, node by node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardcache.cli.cluster.options import nodes_of, nodes_option, tls_of, tls_options
from shardcache.cli.common import fail, json_option, print_json

if TYPE_CHECKING:
    from shardcache.cluster.tier_status import NodeReport


@click.command(
    short_help="Show every node of the tier: what it owns, its hits, and who is down.",
    epilog="Exit codes: 0 all nodes answer and agree; 1 a node is down, or uses a former list, or another than others.",
)
@nodes_option
@click.option("--owner-port", type=click.IntRange(1, 65535), default=9081, show_default=True, metavar="PORT")
@tls_options
@json_option
def status(nodes: str, owner_port: int, plain: bool, ca: str, certificate: str, key: str, as_json: bool) -> None:
    """Show every node of the tier: its share of all shards, cached files and bytes, hits, bytes by source.

    Bytes and hits count since the node's `shardcache cluster run` was started; a node whose nginx was started otherwise
    shows none. Between nodes that are not one machine, it needs a certificate of the cluster: run it on a node.
    """
    import asyncio

    from shardcache.cluster.tier_status import ask

    found = nodes_of(nodes)
    tls = tls_of(found, plain=plain, ca=ca, certificate=certificate, key=key)
    reports = asyncio.run(ask(found, owner_port, tls))
    digests = {report.peers["digest"] for report in reports if report.peers}
    if as_json:
        print_json({"nodes": [report.to_json() for report in reports], "agree": len(digests) <= 1})
    else:
        _print(reports)
        if len(digests) > 1:
            click.echo("The nodes have different lists of nodes: shards are fetched more than once.", err=True)
    if len(digests) != 1 or any(report.peers is None or report.stale for report in reports):
        fail()


def _print(reports: list[NodeReport]) -> None:
    from shardcache.cli.output import make_console, make_table
    from shardcache.units import size

    numbers = ("owns", "files", "cached", "hit share", "from tier", "from store")
    table = make_table("node", *numbers, "peers", "state", numbers=numbers)
    for report in reports:
        figures, peers = report.figures, report.peers
        cells = 5 * ["–"]
        if figures is not None:
            share = "–" if report.hit_share is None else f"{report.hit_share:.1%}"
            amounts = [size(figures[name]) for name in ("from_tier_bytes", "from_store_bytes")]
            cells = [f"{figures['files']:,}", size(figures["cached_bytes"]), share, *amounts]
        seen = "–" if peers is None else f"{peers['peers']} ({peers['digest'][:8]})"
        table.add_row(report.node.name, f"{report.share:.1%}", *cells, seen, report.state)
    make_console().print(table)
