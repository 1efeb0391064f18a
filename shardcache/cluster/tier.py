"""Configuration shared by the nodes of a cluster: the list of them, `Tier`, its stores."""

import hashlib
import ipaddress
import math
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from braceexpand import braceexpand

from shardcache.errors import ConfigError
from shardcache.front import FRONT
from shardcache.units import duration

MIB = 1024 * 1024

PEER_NAME = "shardcache-tier"
"""Name in a certificate that all nodes share; without one, each node's certificate has its own name of the list."""

MAX_COMMON_NAME = 64
"""Characters of a node's name that its certificate's subject has; the alternative name has all of them."""

_WARNED_S = 30 * 86400.0
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_PORTS = {"http": 80, "https": 443}

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_RANGES = re.compile(r"\[([0-9,-]+)\]")
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_OUTSIDE = re.compile(r"(?:[^\s,{}\[\]]|\{[^{}]*\}|\[[^\[\]]*\])+")
_MAX_NODES = 4096

_MAX_WEIGHT = 16
_MAX_WEIGHTS = 16_384


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    name: str  # of its files, and in reports
    address: str  # IP address by which the other nodes reach it

    @property
    def is_loopback(self) -> bool:
        """True if the address reaches only this machine."""
        return ipaddress.ip_address(self.address).is_loopback

    def at(self, port: int) -> str:
        """Return HOST:PORT of one of its ports."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


def parse(text: str) -> tuple[Node, ...]:
    """Return the nodes of a list, in its order.

    Names that have no address in the list are resolved here, so that the files of all nodes agree on the addresses:
    they decide who owns what.

    Args:
        text: NAME, ADDRESS or NAME=ADDRESS, separated by commas or white space, with ranges as in Slurm, `node[1-8]`,
            or as in a shell, `node{1..8}`; the rest of a line after `#` is ignored.

    Raises ConfigError.
    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    nodes = tuple(_node(entry) for line in lines for item in _OUTSIDE.findall(line) for entry in _expanded(item))
    if not nodes:
        raise ConfigError("the list of nodes is empty", remedy="write --nodes node1,node2 or --nodes FILE")
    if len(nodes) > _MAX_NODES:
        raise ConfigError(f"the list has {len(nodes):,} nodes, more than {_MAX_NODES:,}", remedy="list fewer nodes")
    for attribute in ("name", "address"):
        values = [getattr(node, attribute) for node in nodes]
        if twice := next((value for value, count in Counter(values).items() if count > 1), None):
            raise ConfigError(f"the list of nodes has the {attribute} {twice} twice", remedy="list each node once")
    if len({node.is_loopback for node in nodes}) > 1:
        local = next(node for node in nodes if node.is_loopback)
        raise ConfigError(
            f"{local.name} has the loopback address {local.address} here, which no other node can reach",
            remedy=f"write {local.name}=ADDRESS with the address that other nodes connect to",
        )
    return nodes


def _expanded(item: str) -> Iterator[str]:
    try:
        for number, entry in enumerate(braceexpand(_RANGES.sub(_braces, item))):
            if number == _MAX_NODES:
                raise ConfigError(f"{item!r} stands for more than {_MAX_NODES:,} nodes", remedy="list fewer nodes")
            yield entry
    except ValueError:
        raise ConfigError(f"{item!r} has unbalanced braces", remedy="write node{1..8} or node[1-8]") from None


def _braces(ranges: re.Match[str]) -> str:
    items = [_RANGE.sub(r"{\1..\2}", item) for item in ranges[1].split(",")]
    return items[0] if len(items) == 1 else f"{{{','.join(items)}}}"


def _node(entry: str) -> Node:
    name, given, address = entry.partition("=")
    if not _NAME.fullmatch(name) and not is_address(name):
        raise ConfigError(f"{entry!r} is not a node", remedy="write NAME, ADDRESS or NAME=ADDRESS")
    if given and not is_address(address):
        raise ConfigError(f"{address!r} is not an IP address", remedy=f"write {name}=ADDRESS, such as {name}=10.0.0.1")
    return Node(name, str(ipaddress.ip_address(address if given else _resolved(name))))


def is_address(text: str) -> bool:
    """Return True for an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _resolved(name: str) -> str:
    if is_address(name):
        return name
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as exn:
        remedy = f"write {name}=ADDRESS, or take the node off the list"
        raise ConfigError(f"the node {name} has no address: {exn.strerror}", remedy=remedy) from None
    return min({str(info[4][0]) for info in found}, key=lambda text: (":" in text, text))


@dataclass(frozen=True, slots=True)
class Upstream:
    """One object store or web server behind the tier: the only hosts that it connects to."""

    scheme: str  # "http" or "https"
    host: str  # in lower case
    port: int | None  # None for the scheme's own

    @classmethod
    def parse(cls, url: str) -> "Upstream":
        """Parse the url of an endpoint, such as https://s3.eu-central-1.amazonaws.com. Raises ConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        host = (parts.hostname or "").rstrip(".")
        is_host = _HOST.fullmatch(host) or ":" in host
        if parts.scheme not in _PORTS or not is_host or port == 0 or parts.path.strip("/") or parts.query:
            raise ConfigError(
                "the url of a store has a scheme, a host and perhaps a port, and nothing else",
                url=url,
                remedy="write its endpoint, such as https://s3.eu-central-1.amazonaws.com; for a bucket, its region's",
            )
        store = cls(parts.scheme, host, None if port == _PORTS[parts.scheme] else port)
        if store.scheme == "https" and store.is_address:
            raise ConfigError(
                "nginx can verify the certificate of a name, not that of an address",
                url=url,
                remedy="name the store, here and in the daemons' endpoint; or use http",
            )
        return store

    @property
    def authority(self) -> str:
        """Host header of requests to it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def server(self) -> str:
        """HOST:PORT to connect to."""
        return self.authority if self.port is not None else f"{self.authority}:{_PORTS[self.scheme]}"

    @property
    def is_address(self) -> bool:
        """True if the host is an IP address."""
        return is_address(self.host)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of mutual TLS between the nodes."""

    ca: Path
    certificate: Path
    key: Path
    is_shared: bool = False  # True if all nodes have one certificate, of the name `PEER_NAME`

    def name_of(self, node: Node) -> str:
        """Return the name that a node's certificate has to have."""
        return PEER_NAME if self.is_shared else node.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Configuration of a cluster's tier. In paths, `{node}` stands for the node's name."""

    nodes: tuple[Node, ...]  # all nodes; each has the same list
    stores: tuple[Upstream, ...]  # the only hosts that the tier connects to
    owner_port: int = 9081  # port at which nginx serves the other nodes
    listen: str | None = None  # address at which it does so; None for the node's own
    cache_dir: str = "/var/cache/shardcache-tier"  # folder on a local disk for the parts that a node owns, and its logs
    # Folder in memory (tmpfs) for permissions, which contain signed urls, and for the front's socket.
    run_dir: str = str(Path(FRONT).parent)
    max_size_bytes: int = 100_000 * MIB  # of the cached parts
    min_free_bytes: int = 5_000 * MIB  # space always kept free on the cache's filesystem
    trust_s: int = 300  # time for which the store's permission for a signed url is cached
    same_rights: bool = False  # True if all nodes may read the same, so that the permission of one counts for all
    outage_s: int = 0  # time for which a permission is good while the store fails
    stall_timeout_s: float = 20.0  # the daemon's option of that name
    tls: Tls | None = None  # None for plain HTTP between the nodes
    store_ca: Path = Path("/etc/ssl/certs/ca-certificates.crt")  # authorities to trust for https stores
    # DNS servers for the names of stores, with or without a port; none if nginx resolves the names when it starts.
    resolvers: tuple[str, ...] = ()
    ipv6: bool = True  # False for the IPv4 addresses of these names alone
    user: str | None = None  # of nginx' workers if it is started by root; None for nginx' default
    workers: int = 4  # number of nginx' worker processes

    def __post_init__(self) -> None:
        hosts = [store.authority for store in self.stores]
        if twice := next((host for host in hosts if hosts.count(host) > 1), None):
            raise ConfigError(f"two stores have the host {twice}", remedy="name each store once")

    @property
    def weight(self) -> int:
        """Weight of each node, for which nginx puts 160 times as many points on the ring of owners.

        Loads are the more equal the more points there are, and nginx starts the more slowly: with two and a half
        million in all, it takes a second. A lower weight keeps its part of the points, and thus of the owners.
        """
        return max(1, min(_MAX_WEIGHT, _MAX_WEIGHTS // len(self.nodes)))

    @property
    def digest(self) -> str:
        """Hash of what all nodes have to agree on: who they are, and who owns what."""
        peers = sorted(node.at(self.owner_port) for node in self.nodes)
        return hashlib.sha256("\n".join((f"parts, {self.weight}", *peers)).encode()).hexdigest()[:16]

    def node(self, name: str) -> Node:
        """Return a node by its name or address. Raises ConfigError."""
        if found := next((node for node in self.nodes if name in (node.name, node.address)), None):
            return found
        known = ", ".join(node.name for node in self.nodes[:5])
        raise ConfigError(f"{name} is not among the nodes", remedy=f"name one of the {len(self.nodes)}: {known}")

    def cache(self, node: Node) -> Path:
        """Return the cache folder on a node."""
        return _filled(self.cache_dir, node)

    def run(self, node: Node) -> Path:
        """Return the folder in memory on a node."""
        return _filled(self.run_dir, node)

    def front(self, node: Node) -> Path:
        """Return the Unix socket at which nginx serves the daemon of a node."""
        return self.run(node) / Path(FRONT).name

    def tls_of(self, node: Node) -> Tls | None:
        """Return the PEM files on a node."""
        tls = self.tls
        if tls is None:
            return None
        ca, certificate, key = (_filled(str(file), node) for file in (tls.ca, tls.certificate, tls.key))
        return Tls(ca, certificate, key, tls.is_shared)


def expiry_warning(expires_s: float | None) -> str | None:
    """Return a warning if a certificate, which expires at that time, has to be renewed soon; None if it has not."""
    left_s = math.inf if expires_s is None else expires_s - time.time()
    if left_s > _WARNED_S:
        return None
    return f"certificate expires in {duration(left_s)}" if left_s > 0 else "certificate has expired"


def _filled(path: str, node: Node) -> Path:
    return Path(path.replace("{node}", node.name)).absolute()
