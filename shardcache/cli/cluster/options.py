"""Options that describe a cluster's tier, shared by the commands that render and run it."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardcache.cli.common import parse_size
from shardcache.errors import ConfigError

if TYPE_CHECKING:
    from shardcache.cluster.node_list import Node
    from shardcache.cluster.tier import Tier, Tls

Command = TypeVar("Command", bound=Callable[..., Any])

_RESOLV_CONF = Path("/etc/resolv.conf")
_NAMESERVER = re.compile(r"^nameserver\s+([0-9A-Fa-f.:]+)\s*$", re.MULTILINE)
_ENDPOINT = re.compile(r"(?P<address>\[[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*\]|[0-9.]+)(?::(?P<port>[0-9]{1,5}))?")
_AT_START = "none"
_USER = re.compile(r"[a-z_][a-z0-9_-]*")
_FOLDER_NOTE = "`{node}` stands for the node's name."


def nodes_option(command: Command) -> Command:
    """Add `--nodes` as the argument `nodes`."""
    return _nodes_option(command, required=True)


def optional_nodes_option(command: Command) -> Command:
    """Add `--nodes` as the argument `nodes`, None if it is not given."""
    return _nodes_option(command, required=False)


def _nodes_option(command: Command, *, required: bool) -> Command:
    return click.option(
        "--nodes",
        required=required,
        metavar="LIST",
        help="All nodes: NAME, ADDRESS or NAME=ADDRESS, separated by commas, with ranges such as node[1-8] or "
        "node{1..8}; or a file with such a list, or `-` for stdin.",
    )(command)


def tls_options(command: Command) -> Command:
    """Add `--plain`, `--ca`, `--certificate` and `--key`."""
    for name, file, text in (
        ("key", "node.key", "Key of that certificate"),
        ("certificate", "node.pem", "Certificate of the node"),
        ("ca", "ca.pem", "Certificate of the cluster's authority"),
    ):
        default = f"/etc/shardcache/tier/{file}"
        command = click.option(f"--{name}", default=default, show_default=True, metavar="FILE", help=f"{text}.")(
            command
        )
    return click.option(
        "--plain", is_flag=True, help="Plain HTTP between the nodes: whoever reaches an owner's port reads the traffic."
    )(command)


def tier_options(command: Command) -> Command:
    """Add all options that `tier_of` takes, but for `--nodes`."""
    return _store_options(_address_options(_disk_options(_process_options(tls_options(command)))))


def _store_options(command: Command) -> Command:
    """Add the options of the object stores."""
    stores = click.option(
        "--store",
        "stores",
        required=True,
        multiple=True,
        metavar="URL",
        help="Endpoint of an object store, or a web server, such as https://s3.eu-central-1.amazonaws.com; the tier "
        "connects to these hosts and names below them, and to no other. Repeatable.",
    )
    store_ca = click.option(
        "--store-ca",
        type=click.Path(path_type=Path, readable=False),
        default=Path("/etc/ssl/certs/ca-certificates.crt"),
        show_default=True,
        metavar="FILE",
        help="Certificates of the authorities to trust for https stores.",
    )
    resolvers = click.option(
        "--resolver",
        "resolvers",
        multiple=True,
        metavar="ADDRESS[:PORT]",
        callback=_resolvers,
        help="DNS server for the names of stores; repeatable. `none`: nginx resolves them once, when it starts.  "
        "[default: those of /etc/resolv.conf]",
    )
    trust_s = click.option(
        "--trust-s",
        type=click.IntRange(0),
        default=300,
        show_default=True,
        metavar="SECONDS",
        help="Time for which the store's permission for a signed url is cached; also the delay of a revocation.",
    )
    outage_s = click.option(
        "--outage-s",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        metavar="SECONDS",
        help="While the store fails, serve what is cached to nodes that it permitted to read it within this time. "
        "Signatures cannot be checked then.",
    )
    stall_timeout_s = click.option(
        "--stall-timeout-s",
        type=click.FloatRange(1),
        default=20.0,
        show_default=True,
        metavar="SECONDS",
        help="The daemons' --stall-timeout-s, which the tier's time limits follow.",
    )
    return stores(store_ca(resolvers(trust_s(outage_s(stall_timeout_s(command))))))


def _address_options(command: Command) -> Command:
    """Add the options of nginx's own addresses."""
    front = click.option(
        "--front",
        default="127.0.0.1:9080",
        show_default=True,
        metavar="ADDRESS:PORT",
        callback=_host_port,
        help="Where nginx serves the daemon of its node.",
    )
    owner_port = click.option(
        "--owner-port",
        type=click.IntRange(1, 65535),
        default=9081,
        show_default=True,
        metavar="PORT",
        help="Port at which nginx serves the other nodes.",
    )
    listen = click.option(
        "--listen",
        metavar="ADDRESS",
        callback=_address,
        help="Address at which it does so, such as 0.0.0.0 in a container.  [default: the node's own]",
    )
    return front(owner_port(listen(command)))


def _disk_options(command: Command) -> Command:
    """Add the options of the parts that a node caches."""
    cache_dir = click.option(
        "--cache-dir",
        default="/var/cache/shardcache-tier",
        show_default=True,
        metavar="FOLDER",
        help=f"Folder on a local disk for the parts that a node owns. {_FOLDER_NOTE}",
    )
    run_dir = click.option(
        "--run-dir",
        default="/run/shardcache-tier",
        show_default=True,
        metavar="FOLDER",
        help=f"Folder in memory (tmpfs) for permissions, whose names hold signatures. {_FOLDER_NOTE}",
    )
    max_size = click.option(
        "--max-size",
        default="100GiB",
        show_default=True,
        metavar="SIZE",
        callback=parse_size,
        help="Maximum size of the parts that a node caches.",
    )
    min_free = click.option(
        "--min-free",
        default="5GiB",
        show_default=True,
        metavar="SIZE",
        callback=parse_size,
        help="Space always kept free on the filesystem of --cache-dir.",
    )
    spread = click.option(
        "--spread",
        type=click.Choice(["shard", "part"]),
        default="shard",
        show_default=True,
        help="Whether one node owns all parts of a shard, or each part has its own owner.",
    )
    return cache_dir(run_dir(max_size(min_free(spread(command)))))


def _process_options(command: Command) -> Command:
    """Add the options of nginx's processes."""
    user = click.option(
        "--user", metavar="NAME", callback=_user, help="User of nginx's workers if root starts it.  [default: nginx's]"
    )
    workers = click.option(
        "--workers",
        type=click.IntRange(1, 256),
        default=4,
        show_default=True,
        metavar="N",
        help="Worker processes of nginx on a node.",
    )
    return user(workers(command))


def _address(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else str(ipaddress.ip_address(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not an IP address") from None


def _host_port(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    found = _endpoint(text)
    if found is None or not found[1]:
        raise click.BadParameter(f"{text!r} is not ADDRESS:PORT, such as 127.0.0.1:9080")
    return "".join(found)


def _endpoint(text: str) -> tuple[str, str] | None:
    """Return the two parts of ADDRESS or ADDRESS:PORT, the second "" or with its colon; None if it is neither."""
    if found := _ENDPOINT.fullmatch(text):
        try:
            ipaddress.ip_address(found["address"].strip("[]"))
        except ValueError:
            return None
        if found["port"] is None or 0 < int(found["port"]) < 65536:
            return found["address"], f":{found['port']}" if found["port"] else ""
    return None


def _user(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    if text is not None and not _USER.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not the name of a user")
    return text


def _resolvers(_ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...] | None:
    return () if given == (_AT_START,) else tuple(map(_resolver, given)) or None


def _resolver(text: str) -> str:
    """Return the address of a DNS server, with or without a port, as nginx writes it. Raises click.BadParameter."""
    is_bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    found = _endpoint(f"[{text}]" if is_bare_ipv6 else text)
    if found is None:
        raise click.BadParameter(f"{text!r} is neither ADDRESS, nor ADDRESS:PORT, nor `none`")
    return "".join(found)


def nodes_of(text: str) -> tuple[Node, ...]:
    """Return the nodes of `--nodes`. Raises ConfigError."""
    from shardcache.cluster.node_list import parse

    if text == "-":
        return parse(sys.stdin.read())
    try:
        return parse(Path(text).read_text() if "/" in text or Path(text).is_file() else text)
    except FileNotFoundError:
        raise ConfigError("the list of nodes does not exist", url=text, remedy="write it to this file") from None
    except (OSError, UnicodeDecodeError) as exn:
        raise ConfigError(f"cannot read the list of nodes: {exn}", remedy="correct --nodes") from None


def tls_of(nodes: tuple[Node, ...], *, plain: bool, ca: str, certificate: str, key: str) -> Tls | None:
    """Return the files of mutual TLS; None if it is not needed, or not wanted."""
    from shardcache.cluster.tier import Tls

    if plain or all(node.is_loopback for node in nodes):
        return None
    return Tls(Path(ca), Path(certificate), Path(key))


def tier_of(
    nodes: str,
    stores: tuple[str, ...],
    *,
    plain: bool,
    ca: str,
    certificate: str,
    key: str,
    resolvers: tuple[str, ...] | None,
    max_size: int,
    min_free: int,
    **options: Any,
) -> Tier:
    """Return the tier that the options describe. Raises ConfigError."""
    from shardcache.cluster.tier import Tier, Upstream

    found, parsed = nodes_of(nodes), tuple(map(Upstream.parse, stores))
    if resolvers is None:
        resolvers = () if all(store.is_address for store in parsed) else _system_resolvers()
    return Tier(
        nodes=found,
        stores=parsed,
        tls=tls_of(found, plain=plain, ca=ca, certificate=certificate, key=key),
        resolvers=resolvers,
        ipv6=_has_ipv6_route(),
        max_size_bytes=max_size,
        min_free_bytes=min_free,
        **options,
    )


def _has_ipv6_route() -> bool:
    """Return whether this machine has a way to addresses of IPv6; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect(("2000::", 9))
    except OSError:
        return False
    return True


def _system_resolvers() -> tuple[str, ...]:
    try:
        found = _NAMESERVER.findall(_RESOLV_CONF.read_text())
    except OSError:
        found = []
    if not found:
        remedy = "name a DNS server with --resolver, or resolve the store's name when nginx starts: --resolver none"
        raise ConfigError("no DNS server is known here", url=str(_RESOLV_CONF), remedy=remedy)
    return tuple(map(_resolver, found))
