"""`shardcache cluster`: commands for the tier, the cache that the nodes of a cluster share.

The tier is an nginx on each node; the package `shardcache.cluster` does the work. Shards are cached
in parts, each part on one node, its owner. Owners are computed from the list of nodes, so all nodes
need the same list; the list's digest shows whether they have it.
"""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli import common
from shardcache.cli.cluster_options import (
    NODES_OPTION,
    OWNER_PORT_OPTION,
    PATH_TYPE,
    TIER_OPTIONS,
    TLS_OPTIONS,
    is_file,
    nodes_of,
    option,
    tier_of,
    tls_of,
)
from shardcache.shared.exceptions import ConfigError, DaemonError
from shardcache.shared.units import size

if TYPE_CHECKING:
    from shardcache.cluster.tier_status import NodeReport

_SHOWN_DIGEST_CHARS = 8
# Options of `run` that may name a file, which is read again when it changes.
_WATCHED_OPTIONS = ("ca", "certificate", "key", "nodes")


@common.examples(
    "cluster render --nodes nodes.txt --store https://s3.eu-central-1.amazonaws.com --out tier/",
    "cluster render --nodes 10.0.0.[1-8] --plain --store http://10.0.9.9:9000 --out tier/",
)
@click.command(short_help="Write the nginx.conf of each node.", params=[*TIER_OPTIONS])
@click.option(
    "--out",
    required=True,
    type=PATH_TYPE,
    help="Folder for the files, NODE/nginx.conf each; with --node, the file.",
)
@click.option("--node", metavar="NAME", help="Write only the file of this node.")
@common.json_option
def render(out: Path, node: str | None, as_json: bool, **options: Any) -> None:
    """Write the nginx.conf of each node of a cluster.

    When nodes join or leave, run it again with the new list, and reload nginx. Each part that moves
    to another owner is fetched once more. All nodes need the same list and stores. Traffic between
    machines is encrypted, and both sides need a certificate of the cluster: see `shardcache cluster
    certificates`.
    """
    from shardcache.cluster.nginx_conf import render as nginx_conf

    tier = tier_of(**options)
    if node is not None:
        configs = {out: nginx_conf(tier, tier.node(node))}
    else:
        configs = {
            out / member.name / "nginx.conf": nginx_conf(tier, member) for member in tier.nodes
        }
    _write_configs(configs)
    if as_json:
        common.print_json({"digest": tier.digest, "files": [str(path) for path in configs]})
    else:
        for path in configs:
            click.echo(path)


def _write_configs(configs: dict[Path, str]) -> None:
    """Write nginx's configurations to their paths. Raises ConfigError."""
    try:
        for path, text in configs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as exn:
        raise ConfigError(
            f"cannot write {exn.filename}: {exn.strerror}",
            remedy="choose another --out",
        ) from None


@common.examples(
    "cluster certificates --nodes nodes.txt --out authority/",
    "cluster certificates --shared --out authority/",
)
@click.command(
    short_help="Write the nodes' certificates, signed by the cluster's own authority.",
    params=[option("--nodes", metavar="LIST")],  # not required, unlike `NODES_OPTION`
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, readable=False, file_okay=False),
    help="Folder for the authority's files, ca.pem and ca.key, and for each node's files: "
    "NODE/ca.pem, node.pem and node.key.",
)
@click.option(
    "--shared",
    is_flag=True,
    help="Write one certificate for all nodes, in shared/, instead of one per node of "
    "--nodes. For schedulers that give all nodes the same files, such as a "
    "Kubernetes Secret.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="Days for which the certificates are valid.",
)
@common.json_option
def certificates(nodes: str | None, out: Path, shared: bool, days: int, as_json: bool) -> None:
    """Write a certificate for each node, signed by the authority in the folder; if it has none,
    create one.

    Run it again on the same folder before the certificates expire, or when a node joins. Then copy
    NODE/ to /etc/shardcache/tier on that node, and reload nginx. Anyone who has ca.key can admit
    nodes, so keep it off the nodes.
    """
    if (nodes is None) != shared:  # neither option was given, or both
        raise click.UsageError("name the nodes with --nodes, or give --shared")
    try:
        from shardcache.cluster.authority import issue
    except ModuleNotFoundError as exn:
        if exn.name is None or not exn.name.startswith("cryptography"):
            raise
        raise ConfigError(
            "certificates need the package cryptography, which is not installed",
            remedy="pip install 'shardcache[cluster]'",
        ) from None
    listed_nodes = None if nodes is None else nodes_of(nodes)
    issued = issue(listed_nodes, out, days)
    if as_json:
        certificates_json = [
            {
                "node": certificate.node,
                "folder": str(certificate.folder),
                "expires": certificate.expires.isoformat(),
            }
            for certificate in issued
        ]
        common.print_json({"certificates": certificates_json})
    else:
        for certificate in issued:
            click.echo(f"{certificate.folder}: valid until {certificate.expires:%Y-%m-%d}")


@common.examples(
    "cluster run --nodes nodes.txt --store https://s3.eu-central-1.amazonaws.com",
    "cluster run --nodes nodes.txt --node node1 --max-size 1TB --store http://10.0.9.9:9000",
)
@click.command(
    short_help="Run this node's nginx, and apply changes to the list of nodes.",
    params=[*TIER_OPTIONS],
)
@click.option(
    "--node",
    metavar="NAME",
    help="This node's name or address in the list.  [default: its host name]",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until the list has this node and its certificate exists, instead of failing.",
)
@common.json_option
def run(node: str | None, wait: bool, as_json: bool, **options: Any) -> None:
    """Run this node's nginx until SIGTERM, configured as by `shardcache cluster render`.

    Changes to the file with the list of nodes and to the certificates take effect within seconds.
    If the machine went down before the tier was stopped, the cache is cleared at the start. The
    command also publishes the figures that `shardcache cluster status` shows.
    """
    import asyncio
    from threading import Event

    from shardcache.cluster.node_tier import NodeTier
    from shardcache.cluster.waiting import end_waiting, run_when_usable
    from shardcache.server.process.service_notifier import ServiceNotifier

    if options["nodes"] == "-":
        raise ConfigError(
            "a list of nodes from stdin cannot be read again when it changes",
            remedy="write the list to a file: --nodes FILE",
        )
    notifier = ServiceNotifier.take(os.environ, os.getpid())
    host_name, _, _domain = socket.gethostname().partition(".")
    node_name = node or host_name
    run_dir = Path(options["run_dir"].replace("{node}", node_name))
    report = partial(_print_event, "message", as_json=as_json)
    stopping = Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stopping.set())

    def announce_ready(line: str) -> None:
        """Tell the health probe, the operator and systemd that nginx listens."""
        end_waiting(run_dir)
        _print_event("ready", line, as_json=as_json)
        asyncio.run(notifier.notify(READY=1, STATUS=line))

    def run_tier() -> int:
        """Run nginx until `stopping` is set; return its exit status."""
        values = [options[name] for name in _WATCHED_OPTIONS]
        watched = tuple(Path(value) for value in values if is_file(value))
        read_options = partial(tier_of, **options)
        tier = NodeTier(read_options, node_name, watched, report, announce_ready)
        return tier.run(stopping)

    if wait:
        exit_status = run_when_usable(run_tier, run_dir, report, stopping)
    else:
        exit_status = run_tier()
    if exit_status:
        raise DaemonError(
            f"nginx ended with status {exit_status}",
            remedy="see its message above, or the kernel's in dmesg",
        )


def _print_event(event: str, message: str, *, as_json: bool) -> None:
    """Print a message for the operator.

    Without `as_json`, "ready" goes to standard output, and every other message to standard error.

    Args:
        event: "ready" when nginx listens; "message" for any other message.
        message: the message.
        as_json: True to print a line of JSON to standard output.
    """
    if as_json:
        common.print_json({"event": event, "message": message})
    elif event == "ready":
        click.echo(f"ready: {message}")
    else:
        click.echo(message, err=True)


@common.examples(
    "cluster status --nodes nodes.txt",
    "cluster status --nodes node1,node2 --plain --json",
)
@click.command(
    short_help="Show every node of the tier: cached parts, hits, and nodes that are down.",
    epilog="Exit codes: 0 all nodes answer and agree; 1 a node is down, or has an old or "
    "different list.",
    params=[NODES_OPTION, OWNER_PORT_OPTION, *TLS_OPTIONS],
)
@common.json_option
def status(nodes: str, owner_port: int, as_json: bool, **tls: Any) -> None:
    """Show every node of the tier: its cached files and bytes, hits, and bytes by source.

    Bytes and hits count from the start of the node's `shardcache cluster run`. A node whose nginx
    was started in another way shows none. Unless all nodes are on one machine, the command needs a
    certificate of the cluster: run it on a node.
    """
    import asyncio

    from shardcache.cluster.tier_status import ask

    listed_nodes = nodes_of(nodes)
    reports = asyncio.run(ask(listed_nodes, owner_port, tls_of(listed_nodes, **tls)))
    digests = {report.peers["digest"] for report in reports if report.peers}
    have_same_list = len(digests) <= 1
    if as_json:
        common.print_json(
            {
                "nodes": [report.to_json() for report in reports],
                "agree": have_same_list,
            }
        )
    else:
        _print_reports(reports)
        if not have_same_list:
            click.echo(
                "The nodes have different lists of nodes: shards are fetched more than once.",
                err=True,
            )
    # `peers` is None if the node is down.
    some_down_or_stale = any(report.peers is None or report.stale for report in reports)
    if some_down_or_stale or not have_same_list:
        common.fail()


def _print_reports(reports: list[NodeReport]) -> None:
    """Print a table with a row for each node; a dash stands for a missing figure."""
    number_columns = ("files", "cached", "hit share", "from tier", "from store")
    rows = []
    for report in reports:
        figures = report.figures
        numbers = ["–"] * len(number_columns)
        if figures is not None:
            numbers = [
                f"{figures['files']:,}",
                size(figures["cached_bytes"]),
                "–" if report.hit_share is None else f"{report.hit_share:.1%}",
                size(figures["from_tier_bytes"]),
                size(figures["from_store_bytes"]),
            ]
        peers = "–"
        if report.peers is not None:
            digest = report.peers["digest"][:_SHOWN_DIGEST_CHARS]
            peers = f"{report.peers['peers']} ({digest})"
        rows.append((report.node.name, *numbers, peers, report.state))
    common.print_table(("node", *number_columns, "peers", "state"), rows, number_columns)


@common.examples(
    "cluster certificates --nodes nodes.txt --out tier/",
    "cluster status --nodes nodes.txt",
)
@click.group(
    cls=common.OrderedGroup,
    commands=[render, certificates, run, status],
    short_help="Share the nodes' caches, so that a cluster fetches each shard once.",
)
def cluster() -> None:
    """Set up and watch the tier: a cache that the nodes of a cluster share, so that each shard is
    fetched once.

    The tier is an nginx on each node. `certificates` and `render` write its files, and `run` starts
    it. A daemon uses it if its config file has `tier = "/run/shardcache-tier/front.sock"` in an
    [[origin]] table.
    """
