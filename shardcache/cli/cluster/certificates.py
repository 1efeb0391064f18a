"""`shardcache cluster certificates`: certificates for the traffic between the nodes."""

from __future__ import annotations

from pathlib import Path

import click

from shardcache.cli.cluster.options import nodes_of, optional_nodes_option
from shardcache.cli.common import json_option, print_json
from shardcache.errors import ConfigError


@click.command(short_help="Write the certificates of the nodes, signed by the cluster's own authority.")
@optional_nodes_option
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, readable=False, file_okay=False),
    help="Folder of the authority, ca.pem and ca.key, and of each node's files: NODE/ca.pem, node.pem and node.key.",
)
@click.option(
    "--shared",
    is_flag=True,
    help="In place of --nodes: write one certificate for all nodes, shared/, for schedulers that give all of them the "
    "same files, such as a Secret of Kubernetes.",
)
@click.option(
    "--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="Validity of the certificates."
)
@json_option
def certificates(nodes: str | None, out: Path, shared: bool, days: int, as_json: bool) -> None:
    """Write a certificate for each node, signed by the authority in the folder; without one, create it first.

    Run it again before the certificates expire, or for a node that joins, on the same folder; then copy NODE/ to
    /etc/shardcache/tier of each node, and reload nginx. Whoever has ca.key can admit nodes: keep it off them.
    """
    if (nodes is None) is not shared:
        raise click.UsageError("name the nodes with --nodes, or give --shared")
    try:
        from shardcache.cluster.authority import issue_all, issue_shared
    except ModuleNotFoundError as exn:
        if exn.name is None or not exn.name.startswith("cryptography"):
            raise
        remedy = "pip install 'shardcache[cluster]'"
        raise ConfigError("certificates need the package cryptography, which is not installed", remedy=remedy) from None
    issued = [issue_shared(out, days)] if nodes is None else issue_all(nodes_of(nodes), out, days)
    if as_json:
        rows = [{"node": each.node, "folder": str(each.folder), "expires": each.expires.isoformat()} for each in issued]
        print_json({"certificates": rows})
        return
    for each in issued:
        click.echo(f"{each.folder}: valid until {each.expires:%Y-%m-%d}")
