"""`shardcache cluster`: a cache that the nodes of a cluster share, in front of the object stores."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli import common
from shardcache.cluster.tier import Node, Tier, Tls, Upstream, is_address, parse
from shardcache.errors import ConfigError, DaemonError
from shardcache.units import size

if TYPE_CHECKING:
    from shardcache.cluster.tier_status import NodeReport

_RESOLV_CONF = Path("/etc/resolv.conf")
_NAMESERVER = re.compile(r"^nameserver\s+([0-9A-Fa-f.:]+)\s*$", re.MULTILINE)
_ENDPOINT = re.compile(r"(?P<address>\[[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*\]|[0-9.]+)(?::(?P<port>[0-9]{1,5}))?")
_AT_START = "none"
_FOLDER = "/etc/shardcache/tier"
_PATH = click.Path(path_type=Path, readable=False)

_HELP = {
    "--nodes": "All nodes: NAME, ADDRESS or NAME=ADDRESS, separated by commas, with ranges such as node[1-8] or "
    "node{1..8}; or a file with such a list, or `-` for stdin.",
    "--store": "Endpoint of an object store, or a web server, such as https://s3.eu-central-1.amazonaws.com; the tier "
    "connects to these hosts and names below them, and to no other. Repeatable.",
    "--store-ca": "Certificates of the authorities to trust for https stores.",
    "--resolver": "DNS server for the names of stores; repeatable. `none`: nginx resolves them once, when it starts.  "
    "[default: those of /etc/resolv.conf]",
    "--trust-s": "Time for which the store's permission for a signed url is cached; also the delay of a revocation.",
    "--same-rights": "All nodes may read the same: the store is asked once for all of them, rather than once for each "
    "access key, of which every node has its own with instance roles.",
    "--outage-s": "While the store fails, serve what is cached to access keys that it permitted to read it within this "
    "time. Signatures cannot be checked then.",
    "--stall-timeout-s": "The daemons' --stall-timeout-s, which the tier's time limits follow.",
    "--owner-port": "Port at which nginx serves the other nodes.",
    "--listen": "Address at which it does so, such as 0.0.0.0 in a container.  [default: the node's own]",
    "--cache-dir": "Folder on a local disk for the parts that a node owns. `{node}` stands for the node's name.",
    "--run-dir": "Folder in memory (tmpfs) for permissions, whose names hold signatures, and for front.sock, at which "
    "nginx serves its node's daemon. `{node}` stands for the node's name.",
    "--max-size": "Maximum size of the parts that a node caches.",
    "--min-free": "Space always kept free on the filesystem of --cache-dir.",
    "--user": "User of nginx's workers if root starts it; the daemon's.  [default: nginx's]",
    "--workers": "Worker processes of nginx on a node.",
    "--plain": "Plain HTTP between the nodes: whoever reaches an owner's port reads the traffic.",
    "--ca": "Certificate of the cluster's authority.",
    "--certificate": "Certificate of the node.",
    "--key": "Key of that certificate.",
    "--shared-certificate": "All nodes have the same certificate, of the name shardcache-tier, such as that of "
    "`cluster certificates --shared`. Without it, each node's has the node's own name of the list.",
}


# Values of options


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not an IP address") from None


def _endpoint(text: str) -> tuple[str, str] | None:
    """Return the two parts of ADDRESS or ADDRESS:PORT, the second "" or with its colon; None if it is neither."""
    found = _ENDPOINT.fullmatch(text)
    if found and is_address(found["address"].strip("[]")) and 0 < int(found["port"] or 1) < 65536:
        return found["address"], f":{found['port']}" if found["port"] else ""
    return None


def _user(text: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_-]*", text):
        raise click.BadParameter(f"{text!r} is not the name of a user")
    return text


def _resolver(text: str) -> str:
    """Return the address of a DNS server, with or without a port, as nginx writes it."""
    if text == _AT_START:
        return text
    is_bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    found = _endpoint(f"[{text}]" if is_bare_ipv6 else text)
    if found is None:
        raise click.BadParameter(f"{text!r} is neither ADDRESS, nor ADDRESS:PORT, nor `none`")
    return "".join(found)


# Options


def _option(
    flag: str, default: object = None, metavar: str | None = None, *, name: str | None = None, **how: Any
) -> click.Option:
    """Return an option, which is the argument `name` if its name is not the flag's."""
    names = [flag, *filter(None, [name])]
    shown = default is not None
    return click.Option(names, default=default, show_default=shown, metavar=metavar, help=_HELP[flag], **how)


_NODES = _option("--nodes", None, "LIST", required=True)
_OWNER_PORT = _option("--owner-port", 9081, "PORT", type=click.IntRange(1, 65535))
_TLS = (
    _option("--plain", is_flag=True),
    _option("--ca", f"{_FOLDER}/ca.pem", "FILE"),
    _option("--certificate", f"{_FOLDER}/node.pem", "FILE"),
    _option("--key", f"{_FOLDER}/node.key", "FILE"),
    _option("--shared-certificate", is_flag=True),
)
_TLS_NAMES = [str(option.name) for option in _TLS]
_TIER = (
    _NODES,
    _option("--store", None, "URL", name="stores", required=True, multiple=True),
    _option("--store-ca", Path("/etc/ssl/certs/ca-certificates.crt"), "FILE", type=_PATH),
    _option("--resolver", None, "ADDRESS[:PORT]", name="resolvers", multiple=True, type=_resolver),
    _option("--trust-s", 300, "SECONDS", type=click.IntRange(0)),
    _option("--same-rights", is_flag=True),
    _option("--outage-s", 0, "SECONDS", type=click.IntRange(0)),
    _option("--stall-timeout-s", 20.0, "SECONDS", type=click.FloatRange(1)),
    _OWNER_PORT,
    _option("--listen", None, "ADDRESS", type=_address),
    _option("--cache-dir", "/var/cache/shardcache-tier", "FOLDER"),
    _option("--run-dir", "/run/shardcache-tier", "FOLDER"),
    _option("--max-size", "100GiB", "SIZE", name="max_size_bytes", type=common.parse_size),
    _option("--min-free", "5GiB", "SIZE", name="min_free_bytes", type=common.parse_size),
    _option("--user", None, "NAME", type=_user),
    _option("--workers", 4, "N", type=click.IntRange(1, 256)),
    *_TLS,
)


def _nodes_of(text: str) -> tuple[Node, ...]:
    """Return the nodes of `--nodes`. Raises ConfigError."""
    if text == "-":
        return parse(sys.stdin.read())
    try:
        return parse(Path(text).read_text() if "/" in text or _is_file(text) else text)
    except FileNotFoundError:
        raise ConfigError("the list of nodes does not exist", url=text, remedy="write it to this file") from None
    except (OSError, UnicodeDecodeError) as exn:
        raise ConfigError(f"cannot read the list of nodes: {exn}", remedy="correct --nodes") from None


def _is_file(text: str) -> bool:
    """Return True if a file has this path; a list of nodes may be too long for one."""
    with suppress(OSError):
        return Path(text).is_file()
    return False


def _tls_of(
    nodes: tuple[Node, ...], *, plain: bool, ca: str, certificate: str, key: str, shared_certificate: bool
) -> Tls | None:
    """Return the files of mutual TLS; None if it is not needed, or not wanted."""
    if plain or all(node.is_loopback for node in nodes):
        return None
    return Tls(Path(ca), Path(certificate), Path(key), shared_certificate)


def _tier_of(nodes: str, stores: tuple[str, ...], resolvers: tuple[str, ...], **options: Any) -> Tier:
    """Return the tier that the options describe. Raises ConfigError."""
    found, upstreams = _nodes_of(nodes), tuple(map(Upstream.parse, stores))
    tls = _tls_of(found, **{name: options.pop(name) for name in _TLS_NAMES})
    if resolvers == (_AT_START,) or (not resolvers and all(store.is_address for store in upstreams)):
        resolvers = ()
    elif not resolvers:
        resolvers = _system_resolvers()
    return Tier(nodes=found, stores=upstreams, tls=tls, resolvers=resolvers, ipv6=_has_ipv6_route(), **options)


def _has_ipv6_route() -> bool:
    """Return whether this machine has a way to addresses of IPv6; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect(("2000::", 9))
        return True
    return False


def _system_resolvers() -> tuple[str, ...]:
    found = _NAMESERVER.findall(_RESOLV_CONF.read_text()) if _RESOLV_CONF.is_file() else []
    if not found:
        remedy = "name a DNS server with --resolver, or resolve the store's name when nginx starts: --resolver none"
        raise ConfigError("no DNS server is known here", url=str(_RESOLV_CONF), remedy=remedy)
    return tuple(map(_resolver, found))


# Commands


@common.examples(
    "cluster render --nodes nodes.txt --store https://s3.eu-central-1.amazonaws.com --out tier/",
    "cluster render --nodes 10.0.0.[1-8] --plain --store http://10.0.9.9:9000 --out tier/",
)
@click.command(short_help="Write the nginx.conf of each node.", params=[*_TIER])
@click.option(
    "--out", required=True, type=_PATH, help="Folder for the files, as NODE/nginx.conf; with --node, the file."
)
@click.option("--node", metavar="NAME", help="Write the file of this node alone.")
@common.json_option
def render(out: Path, node: str | None, as_json: bool, **options: Any) -> None:
    """Write the nginx.conf of each node of a cluster.

    Run it again with another list when nodes join or leave, and reload nginx: each part that moves to another owner is
    fetched once more. All nodes need the same list and stores. Between nodes that are not one machine, traffic is
    encrypted and both sides need a certificate of the cluster: see `shardcache cluster certificates`.
    """
    from shardcache.cluster.nginx import render as nginx_conf

    tier = _tier_of(**options)
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
        common.print_json({"digest": tier.digest, "files": [str(path) for path in texts]})
    else:
        click.echo("".join(f"{path}\n" for path in texts), nl=False)


@common.examples(
    "cluster certificates --nodes nodes.txt --out authority/", "cluster certificates --shared --out authority/"
)
@click.command(
    short_help="Write the certificates of the nodes, signed by the cluster's own authority.",
    params=[_option("--nodes", None, "LIST")],
)
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
@common.json_option
def certificates(nodes: str | None, out: Path, shared: bool, days: int, as_json: bool) -> None:
    """Write a certificate for each node, signed by the authority in the folder; without one, create it first.

    Run it again before the certificates expire, or for a node that joins, on the same folder; then copy NODE/ to
    /etc/shardcache/tier of each node, and reload nginx. Whoever has ca.key can admit nodes: keep it off them.
    """
    if (nodes is None) is not shared:
        raise click.UsageError("name the nodes with --nodes, or give --shared")
    try:
        from shardcache.cluster.authority import issue
    except ModuleNotFoundError as exn:
        if exn.name is None or not exn.name.startswith("cryptography"):
            raise
        remedy = "pip install 'shardcache[cluster]'"
        raise ConfigError("certificates need the package cryptography, which is not installed", remedy=remedy) from None
    issued = issue(None if nodes is None else _nodes_of(nodes), out, days)
    if as_json:
        rows = [{"node": each.node, "folder": str(each.folder), "expires": each.expires.isoformat()} for each in issued]
        common.print_json({"certificates": rows})
    else:
        click.echo("".join(f"{each.folder}: valid until {each.expires:%Y-%m-%d}\n" for each in issued), nl=False)


@common.examples(
    "cluster run --nodes nodes.txt --store https://s3.eu-central-1.amazonaws.com",
    "cluster run --nodes nodes.txt --node node1 --max-size 1TB --store http://10.0.9.9:9000",
)
@click.command(short_help="Run this node's nginx, and follow changes of the list of nodes.", params=[*_TIER])
@click.option("--node", metavar="NAME", help="This node's name or address in the list.  [default: its host name]")
@click.option(
    "--wait", is_flag=True, help="Wait for a list that has this node, and for its certificate, rather than fail."
)
@common.json_option
def run(node: str | None, wait: bool, as_json: bool, **options: Any) -> None:
    """Run this node's nginx until SIGTERM, with the configuration that `shardcache cluster render` would write.

    While it runs, changes of the file with the list of nodes, and of the certificates, are put to use within seconds.
    It clears the cache if this machine went down before the tier was stopped, and publishes the figures that
    `shardcache cluster status` shows.
    """
    import asyncio
    from threading import Event

    from shardcache.cluster.nginx import NodeTier
    from shardcache.cluster.waiting import end_waiting, run_when_usable
    from shardcache.server.lifecycle import ServiceNotifier

    if options["nodes"] == "-":
        raise ConfigError("the list of nodes is read again when it changes", remedy="put it into a file: --nodes FILE")

    def tell(event: str, message: str) -> None:
        if as_json:
            common.print_json({"event": event, "message": message})
        else:
            click.echo(f"ready: {message}" if event == "ready" else message, err=event != "ready")

    notifier = ServiceNotifier.take(os.environ, os.getpid())

    name = node or socket.gethostname().partition(".")[0]
    run_dir = Path(options["run_dir"].replace("{node}", name))

    def ready(line: str) -> None:
        end_waiting(run_dir)
        tell("ready", line)
        asyncio.run(notifier.tell(READY=1, STATUS=line))

    say = partial(tell, "message")
    stopping = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())

    def start() -> int:
        files = [Path(options[option]) for option in ("ca", "certificate", "key", "nodes") if _is_file(options[option])]
        return NodeTier(lambda: _tier_of(**options), name, tuple(files), say, ready).run(stopping)

    status = run_when_usable(start, run_dir, say, stopping) if wait else start()
    if status:
        raise DaemonError(f"nginx ended with status {status}", remedy="see its message above, or the kernel's in dmesg")


@common.examples("cluster status --nodes nodes.txt", "cluster status --nodes node1,node2 --plain --json")
@click.command(
    short_help="Show every node of the tier: its cached parts, its hits, and who is down.",
    epilog="Exit codes: 0 all nodes answer and agree; 1 a node is down, or has an old or different list.",
    params=[_NODES, _OWNER_PORT, *_TLS],
)
@common.json_option
def status(nodes: str, owner_port: int, as_json: bool, **tls: Any) -> None:
    """Show every node of the tier: its cached files and bytes, hits, bytes by source.

    Bytes and hits count since the node's `shardcache cluster run` was started; a node whose nginx was started otherwise
    shows none. Between nodes that are not one machine, it needs a certificate of the cluster: run it on a node.
    """
    import asyncio

    from shardcache.cluster.tier_status import ask

    found = _nodes_of(nodes)
    reports = asyncio.run(ask(found, owner_port, _tls_of(found, **tls)))
    digests = {report.peers["digest"] for report in reports if report.peers}
    if as_json:
        common.print_json({"nodes": [report.to_json() for report in reports], "agree": len(digests) <= 1})
    else:
        _print(reports)
        if len(digests) > 1:
            click.echo("The nodes have different lists of nodes: shards are fetched more than once.", err=True)
    if len(digests) != 1 or any(report.peers is None or report.stale for report in reports):
        common.fail()


def _print(reports: list[NodeReport]) -> None:
    numbers = ("files", "cached", "hit share", "from tier", "from store")
    rows = []
    for report in reports:
        figures, peers = report.figures, report.peers
        cells = 5 * ["–"]
        if figures is not None:
            share = "–" if report.hit_share is None else f"{report.hit_share:.1%}"
            amounts = [size(figures[name]) for name in ("from_tier_bytes", "from_store_bytes")]
            cells = [f"{figures['files']:,}", size(figures["cached_bytes"]), share, *amounts]
        seen = "–" if peers is None else f"{peers['peers']} ({peers['digest'][:8]})"
        rows.append((report.node.name, *cells, seen, report.state))
    common.print_table(("node", *numbers, "peers", "state"), rows, numbers)


@common.examples("cluster certificates --nodes nodes.txt --out tier/", "cluster status --nodes nodes.txt")
@click.group(
    cls=common.Family,
    commands=[render, certificates, run, status],
    short_help="Share the nodes' caches, so that a cluster fetches a shard once.",
)
def cluster() -> None:
    """Set up and watch the tier: a cache that the nodes of a cluster share, so that each shard is fetched once.

    nginx on each node is the tier. `certificates` and `render` make its files, `run` starts it, and
    `[[origin]] tier = "/run/shardcache-tier/front.sock"` in the config file has the daemon use it.
    """
