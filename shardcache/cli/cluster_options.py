"""Options of `shardcache cluster`, and the tier that they describe.

The tier is the cache that the nodes of a cluster share, an nginx on each node. Shards are cached in
parts, each part on one node, its owner. The stores are the object stores and web servers from which
owners fetch. `tier_of` makes the tier's configuration out of the options' values.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from shardcache.cli import common
from shardcache.cluster.node_list import Node, is_address, parse
from shardcache.cluster.tier_config import Tier, Tls, Upstream
from shardcache.shared.exceptions import ConfigError

_RESOLV_CONF = Path("/etc/resolv.conf")
_NAMESERVER = re.compile(r"^nameserver\s+([0-9A-Fa-f.:]+)\s*$", re.MULTILINE)
_ENDPOINT = re.compile(
    r"(?P<address>\[[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*\]|[0-9.]+)(?::(?P<port>[0-9]{1,5}))?",
)
_USER = re.compile(r"[a-z_][a-z0-9_-]*")
_MAX_PORT = 65535
# A public address and the port "discard". Only a route to the address is looked up; nothing is sent
# to it.
_PUBLIC_IPV6 = ("2000::", 9)
# The value of --resolver that makes nginx resolve the stores' names once, when it starts.
_RESOLVE_AT_START = "none"
# The folder of a node's certificate, unless the options name others.
_CERTIFICATE_FOLDER = "/etc/shardcache/tier"
PATH_TYPE = click.Path(path_type=Path, readable=False)

# Help texts by flag, apart from the options, so that the options fit a line each below.
_HELP = {
    "--nodes": "All nodes, separated by commas: NAME, ADDRESS or NAME=ADDRESS, with ranges such "
    "as node[1-8] or node{1..8}; or a file with such a list, or `-` for stdin.",
    "--store": "Endpoint of an object store or web server, such as "
    "https://s3.eu-central-1.amazonaws.com. The tier connects to these hosts and to "
    "names below them, and to no others. Repeatable.",
    "--store-ca": "File with the certificate authorities to trust for https stores.",
    "--resolver": "DNS server that resolves the stores' names; repeatable. With `none`, nginx "
    "resolves them once, when it starts.  [default: those of /etc/resolv.conf]",
    "--trust-s": "Seconds for which the store's permission for a signed url is cached. A revoked "
    "permission stays valid for up to this long.",
    "--same-rights": "Ask the store once for all nodes, because all of them may read the same. "
    "Otherwise the store is asked once per access key, and with instance roles every "
    "node has a key of its own.",
    "--outage-s": "While the store fails, serve cached parts to access keys that it permitted to "
    "read them within this many seconds. Signatures cannot be checked then.",
    "--stall-timeout-s": "The daemons' --stall-timeout-s, from which the tier derives its limits.",
    "--owner-port": "Port at which nginx serves the other nodes.",
    "--listen": "Address at which nginx serves the other nodes, such as 0.0.0.0 in a container.  "
    "[default: the node's own]",
    "--cache-dir": "Folder on a local disk for the parts that a node owns. `{node}` is replaced by "
    "the node's name.",
    "--run-dir": "Folder in memory (tmpfs) for front.sock, at which nginx serves its node's "
    "daemon, and for cached permissions, whose names contain signatures. `{node}` is "
    "replaced by the node's name.",
    "--max-size": "Maximum size of the parts cached per node.",
    "--min-free": "Free space to leave on the filesystem of --cache-dir.",
    "--user": "User that nginx's workers run as if root starts nginx: the daemon's user.  "
    "[default: nginx's]",
    "--workers": "Worker processes of nginx per node.",
    "--plain": "Use plain HTTP between the nodes, without certificates. Anyone who reaches an "
    "owner's port can read the traffic.",
    "--ca": "Certificate of the cluster's authority.",
    "--certificate": "Certificate of the node.",
    "--key": "Key of that certificate.",
    "--shared-certificate": "All nodes use one certificate, whose name is shardcache-tier, such as "
    "that of `cluster certificates --shared`. Otherwise each node's "
    "certificate has the node's name in the list.",
}


# Parsers of option values


def _parse_address(text: str) -> str:
    """Return an IP address in its usual notation. Raises click.BadParameter."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not an IP address") from None


def _parse_user(text: str) -> str:
    """Return a user's name unchanged. Raises click.BadParameter if it is malformed."""
    if not _USER.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not the name of a user")
    return text


def _parse_resolver(text: str) -> str:
    """Return the address of a DNS server, with or without a port, in nginx's notation.

    The value "none" is returned unchanged. Raises click.BadParameter.
    """
    if text == _RESOLVE_AT_START:
        return text
    is_bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    endpoint = f"[{text}]" if is_bare_ipv6 else text
    if not _is_endpoint(endpoint):
        raise click.BadParameter(f"{text!r} is neither ADDRESS, nor ADDRESS:PORT, nor `none`")
    return endpoint


def _is_endpoint(text: str) -> bool:
    """Return True for ADDRESS or ADDRESS:PORT, with an IPv6 address in brackets."""
    match = _ENDPOINT.fullmatch(text)
    if match is None or not is_address(match["address"].strip("[]")):
        return False
    return match["port"] is None or 0 < int(match["port"]) <= _MAX_PORT


# Options


def option(
    flag: str,
    default: object = None,
    metavar: str | None = None,
    *,
    name: str | None = None,
    **attributes: Any,
) -> click.Option:
    """Return an option with the help text of its flag.

    Args:
        flag: the option's flag, such as "--nodes".
        default: default value of the option; None for no default.
        metavar: word for the option's value in the help; None for click's own choice.
        name: name of the command's argument; None to derive the name from the flag.
        attributes: further arguments of `click.Option`.
    """
    names = [flag] if name is None else [flag, name]
    return click.Option(
        names,
        default=default,
        show_default=default is not None,
        metavar=metavar,
        help=_HELP[flag],
        **attributes,
    )


NODES_OPTION = option("--nodes", metavar="LIST", required=True)
OWNER_PORT_OPTION = option("--owner-port", 9081, "PORT", type=click.IntRange(1, _MAX_PORT))
TLS_OPTIONS = (
    option("--plain", is_flag=True),
    option("--ca", f"{_CERTIFICATE_FOLDER}/ca.pem", "FILE"),
    option("--certificate", f"{_CERTIFICATE_FOLDER}/node.pem", "FILE"),
    option("--key", f"{_CERTIFICATE_FOLDER}/node.key", "FILE"),
    option("--shared-certificate", is_flag=True),
)
# The arguments of `tls_of` that these options become.
_TLS_ARGUMENTS = {str(tls_option.name) for tls_option in TLS_OPTIONS}
TIER_OPTIONS = (
    NODES_OPTION,
    option("--store", metavar="URL", name="stores", required=True, multiple=True),
    option("--store-ca", Path("/etc/ssl/certs/ca-certificates.crt"), "FILE", type=PATH_TYPE),
    option(
        "--resolver",
        metavar="ADDRESS[:PORT]",
        name="resolvers",
        multiple=True,
        type=_parse_resolver,
    ),
    option("--trust-s", 300, "SECONDS", type=click.IntRange(0)),
    option("--same-rights", is_flag=True),
    option("--outage-s", 0, "SECONDS", type=click.IntRange(0)),
    option("--stall-timeout-s", 20.0, "SECONDS", type=click.FloatRange(1)),
    OWNER_PORT_OPTION,
    option("--listen", metavar="ADDRESS", type=_parse_address),
    option("--cache-dir", "/var/cache/shardcache-tier", "FOLDER"),
    option("--run-dir", "/run/shardcache-tier", "FOLDER"),
    option("--max-size", "100GiB", "SIZE", name="max_size_bytes", type=common.parse_size),
    option("--min-free", "5GiB", "SIZE", name="min_free_bytes", type=common.parse_size),
    option("--user", metavar="NAME", type=_parse_user),
    option("--workers", 4, "N", type=click.IntRange(1, 256)),
    *TLS_OPTIONS,
)


def nodes_of(text: str) -> tuple[Node, ...]:
    """Return the nodes that a value of `--nodes` lists. Raises ConfigError.

    Args:
        text: a list of nodes, the path of a file with a list, or "-" for standard input.
    """
    if text == "-":
        return parse(sys.stdin.read())
    is_path = "/" in text or is_file(text)
    try:
        node_list = Path(text).read_text() if is_path else text
        return parse(node_list)
    except FileNotFoundError:
        raise ConfigError(
            "the list of nodes does not exist",
            url=text,
            remedy="write the list to this file, or correct --nodes",
        ) from None
    except (OSError, UnicodeDecodeError) as exn:
        raise ConfigError(
            f"cannot read the list of nodes: {exn}",
            remedy="correct --nodes",
        ) from None


def is_file(text: str) -> bool:
    """Return True for the path of a file, and False for a list of nodes."""
    with suppress(OSError):  # a list of nodes may be too long for a path
        return Path(text).is_file()
    return False


def tls_of(
    nodes: tuple[Node, ...],
    *,
    plain: bool,
    ca: str,
    certificate: str,
    key: str,
    shared_certificate: bool,
) -> Tls | None:
    """Return the files for mutual TLS between the nodes, or None for plain HTTP.

    Plain HTTP is used with --plain, and if all nodes are on this machine. The keyword arguments are
    the values of `TLS_OPTIONS`.
    """
    if plain or all(node.is_loopback for node in nodes):
        return None
    return Tls(Path(ca), Path(certificate), Path(key), is_shared=shared_certificate)


def tier_of(
    nodes: str,
    stores: tuple[str, ...],
    resolvers: tuple[str, ...],
    **options: Any,
) -> Tier:
    """Return the tier that the options describe. Raises ConfigError.

    Args:
        nodes: the value of --nodes.
        stores: urls of the stores.
        resolvers: addresses of DNS servers; ("none",) to resolve the stores' names when nginx
            starts; empty for the DNS servers of this machine.
        options: values of the other `TIER_OPTIONS`, those of `TLS_OPTIONS` among them.
    """
    tls_options = {name: options.pop(name) for name in _TLS_ARGUMENTS}
    listed_nodes = nodes_of(nodes)
    upstreams = tuple(map(Upstream.parse, stores))
    if resolvers == (_RESOLVE_AT_START,):
        resolvers = ()
    elif not resolvers and any(not store.is_address for store in upstreams):
        resolvers = _system_resolvers()
    return Tier(
        nodes=listed_nodes,
        stores=upstreams,
        tls=tls_of(listed_nodes, **tls_options),
        resolvers=resolvers,
        ipv6=_has_ipv6_route(),
        **options,
    )


def _system_resolvers() -> tuple[str, ...]:
    """Return the DNS servers of this machine. Raises ConfigError if it has no DNS server."""
    addresses: list[str] = []
    if _RESOLV_CONF.is_file():
        addresses = _NAMESERVER.findall(_RESOLV_CONF.read_text())
    if not addresses:
        raise ConfigError(
            "this machine's configuration names no DNS server",
            url=str(_RESOLV_CONF),
            remedy="name a DNS server with --resolver, "
            "or resolve the store's name when nginx starts: --resolver none",
        )
    return tuple(map(_parse_resolver, addresses))


def _has_ipv6_route() -> bool:
    """Return True if this machine has a route to public IPv6 addresses."""
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket only looks up a route, and sends nothing.
        probe.connect(_PUBLIC_IPV6)
        return True
    return False
