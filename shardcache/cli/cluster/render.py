"""`shardcache cluster render`: nginx.conf of each node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardcache.cli.cluster.options import nodes_option, tier_of, tier_options
from shardcache.cli.common import json_option, print_json
from shardcache.errors import ConfigError


@click.command(short_help="Write the nginx.conf of each node.")
@nodes_option
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, readable=False),
    help="Folder for the files, as NODE/nginx.conf; with --node, the file.",
)
@click.option("--node", metavar="NAME", help="Write the file of this node alone.")
@tier_options
@json_option
def render(nodes: str, stores: tuple[str, ...], out: Path, node: str | None, as_json: bool, **options: Any) -> None:
    """Write the nginx.conf of each node of a cluster.

    Run it again with another list when nodes join or leave, and reload nginx: each shard that moves to another owner is
    fetched once more. All nodes need the same list, stores and --spread. Between nodes that are not one machine,
    traffic is encrypted and both sides need a certificate of the cluster: see `shardcache cluster certificates`.
    """
    from shardcache.cluster.nginx import render as nginx_conf

    tier = tier_of(nodes, stores, **options)
    if node is not None:
        texts = {out: nginx_conf(tier, tier.node(node))}
    else:
        texts = {out / each.name / "nginx.conf": nginx_conf(tier, each) for each in tier.nodes}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as exn:
        raise ConfigError(f"cannot write {exn.filename}: {exn.strerror}", remedy="choose another --out") from None
    if as_json:
        print_json({"digest": tier.digest, "files": [str(path) for path in texts]})
    else:
        click.echo("".join(f"{path}\n" for path in texts), nl=False)
