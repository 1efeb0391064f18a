"""Configuration that the nodes of a cluster share: `Tier`, its stores and its certificates.

The tier is a cache that the nodes share: an nginx on each node, in front of the object stores. The
options of `shardcache cluster` make a `Tier` (`cli.cluster_options`); `nginx_conf` turns it into
the nginx.conf of each node.

The owner of a part, which is a range of an object, is the node that fetches and caches it. A
permission is the object store's answer that a signed url may be read; nginx caches it for a time.
"""

import hashlib
import math
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shardcache.cluster.node_list import Node, is_address
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.front import FRONT
from shardcache.shared.units import duration

MIB = 1024 * 1024

PEER_NAME = "shardcache-tier"
"""Name in a certificate that all nodes share.

Otherwise, each node has a certificate with the node's name in the list of nodes.
"""

MAX_COMMON_NAME = 64
"""Maximum length of the name in a certificate's subject, in characters.

A longer name is cut in the subject; the certificate's alternative name has all of it.
"""

_WARN_BEFORE_S = 30 * 86400.0  # warnings begin this long before a certificate expires
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_PORTS = {"http": 80, "https": 443}
_DIGEST_CHARS = 16
_SHOWN_NODES = 5

# See `Tier.weight`.
_MAX_NODE_WEIGHT = 16
_MAX_TOTAL_WEIGHT = 16_384


@dataclass(frozen=True, slots=True)
class Upstream:
    """One object store or web server behind the tier; nginx connects to no other hosts.

    Attributes:
        scheme: "http" or "https".
        host: name or IP address of the host, in lower case.
        port: port of the host; None for the scheme's default port.
    """

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, url: str) -> "Upstream":
        """Parse the url of an endpoint, such as https://s3.eu-central-1.amazonaws.com.

        Raises ConfigError.
        """
        parsed = urlsplit(url)
        try:
            port = parsed.port
        except ValueError:
            port = 0  # refused below
        host = (parsed.hostname or "").rstrip(".")
        # The pattern matches names and IPv4 addresses; a host with a colon is an IPv6 address.
        is_host = _HOST.fullmatch(host) is not None or ":" in host
        is_endpoint = parsed.scheme in _PORTS and is_host and port != 0
        has_user = parsed.username is not None
        surplus = (has_user, parsed.path.strip("/"), parsed.query, parsed.fragment)
        if not is_endpoint or any(surplus):
            raise ConfigError(
                "a store's url may have a scheme, a host and a port, and nothing else",
                url=url,
                remedy="write the store's endpoint, such as "
                "https://s3.eu-central-1.amazonaws.com; for a bucket, the endpoint "
                "of its region",
            )
        if port == _PORTS[parsed.scheme]:
            port = None
        store = cls(parsed.scheme, host, port)
        if store.scheme == "https" and store.is_address:
            raise ConfigError(
                "nginx can verify a certificate for a host name, but not for an address",
                url=url,
                remedy="write the store's host name, here and in the daemons' endpoint_url; "
                "or use http",
            )
        return store

    @property
    def authority(self) -> str:
        """Host header of requests to the store: host, and port unless it is the default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def server(self) -> str:
        """HOST:PORT to connect to."""
        if self.port is not None:
            return self.authority
        return f"{self.authority}:{_PORTS[self.scheme]}"

    @property
    def is_address(self) -> bool:
        """True if the host is an IP address."""
        return is_address(self.host)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of mutual TLS between the nodes.

    Attributes:
        ca: file with the certificates of the authorities to trust.
        certificate: file with the node's certificate.
        key: file with the key of that certificate.
        is_shared: True if all nodes have the same certificate, with the name `PEER_NAME`.
    """

    ca: Path
    certificate: Path
    key: Path
    is_shared: bool = False

    def name_of(self, node: Node) -> str:
        """Return the name that a node's certificate has to have."""
        return PEER_NAME if self.is_shared else node.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Configuration of a cluster's tier. In paths, `{node}` stands for the node's name.

    Attributes:
        nodes: all nodes of the cluster; each node has the same list.
        stores: the object stores and web servers behind the tier.
        owner_port: port at which nginx serves the other nodes.
        listen: address at which nginx serves the other nodes; None for the node's own address.
        cache_dir: folder on a local disk for the parts that a node owns, and for nginx's logs.
        run_dir: folder in memory (tmpfs) for permissions, which contain signed urls, and for the
            front, the socket at which nginx serves the node's daemon.
        max_size_bytes: maximum size of the cached parts of a node.
        min_free_bytes: space always kept free on the cache's filesystem.
        trust_s: time for which the store's permission for a signed url is cached.
        same_rights: True if all nodes may read the same objects, so that a permission that one node
            got counts for all.
        outage_s: time for which a permission is good while the store fails; 0 if it is good only as
            long as otherwise.
        stall_timeout_s: the daemon's option of that name.
        tls: files of mutual TLS; None for plain HTTP between the nodes.
        store_ca: file with the authorities to trust for https stores.
        resolvers: DNS servers for the names of stores, with or without a port; empty if nginx
            resolves the names when it starts.
        ipv6: False to use only the IPv4 addresses of the stores' names.
        user: user of nginx's workers if root starts nginx; None for nginx's default.
        workers: number of nginx's worker processes.
    """

    nodes: tuple[Node, ...]
    stores: tuple[Upstream, ...]
    owner_port: int = 9081
    listen: str | None = None
    cache_dir: str = "/var/cache/shardcache-tier"
    run_dir: str = str(Path(FRONT).parent)
    max_size_bytes: int = 100_000 * MIB
    min_free_bytes: int = 5_000 * MIB
    trust_s: int = 300
    same_rights: bool = False
    outage_s: int = 0
    stall_timeout_s: float = 20.0
    tls: Tls | None = None
    store_ca: Path = Path("/etc/ssl/certs/ca-certificates.crt")
    resolvers: tuple[str, ...] = ()
    ipv6: bool = True
    user: str | None = None
    workers: int = 4

    def __post_init__(self) -> None:
        hosts = Counter(store.authority for store in self.stores)
        for host, count in hosts.items():
            if count > 1:
                raise ConfigError(
                    f"two stores have the host {host}",
                    remedy="name each store once",
                )

    @property
    def weight(self) -> int:
        """Weight of each node on the consistent-hash ring that decides the owner of each part.

        nginx puts 160 points on the ring for each unit of weight. With more points, the nodes'
        loads are more equal, but nginx takes longer to start: a second for 2.5 million points. So
        the weight falls as nodes join. Each node then keeps some of its points, so that most parts
        keep their owner.
        """
        return max(1, min(_MAX_NODE_WEIGHT, _MAX_TOTAL_WEIGHT // len(self.nodes)))

    @property
    def digest(self) -> str:
        """Hash of everything that decides the owner of each part; all nodes have to agree on it."""
        peers = sorted(node.at(self.owner_port) for node in self.nodes)
        # With "parts", the digest differs from that of older versions, in which an owner had whole
        # shards.
        text = "\n".join((f"parts, {self.weight}", *peers))
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]

    def node(self, name: str) -> Node:
        """Return a node by its name or address. Raises ConfigError."""
        for node in self.nodes:
            if name in (node.name, node.address):
                return node
        examples = ", ".join(node.name for node in self.nodes[:_SHOWN_NODES])
        raise ConfigError(
            f"{name} is not among the nodes",
            remedy=f"name one of the {len(self.nodes)}: {examples}",
        )

    def cache_folder(self, node: Node) -> Path:
        """Return the cache folder on a node."""
        return _path_on(self.cache_dir, node)

    def run_folder(self, node: Node) -> Path:
        """Return the folder in memory (`run_dir`) on a node."""
        return _path_on(self.run_dir, node)

    def front(self, node: Node) -> Path:
        """Return the Unix socket at which nginx serves the daemon of a node."""
        return self.run_folder(node) / Path(FRONT).name

    def tls_of(self, node: Node) -> Tls | None:
        """Return the PEM files on a node; None for plain HTTP between the nodes."""
        tls = self.tls
        if tls is None:
            return None
        return Tls(
            ca=_path_on(str(tls.ca), node),
            certificate=_path_on(str(tls.certificate), node),
            key=_path_on(str(tls.key), node),
            is_shared=tls.is_shared,
        )


def expiry_warning(expires_s: float | None) -> str | None:
    """Return a warning if a certificate has expired or expires soon; None otherwise.

    Args:
        expires_s: when the certificate expires, in seconds since the epoch; None if that is
            unknown, or there is no certificate.
    """
    remaining_s = math.inf if expires_s is None else expires_s - time.time()
    if remaining_s > _WARN_BEFORE_S:
        return None
    if remaining_s <= 0:
        return "certificate has expired"
    return f"certificate expires in {duration(remaining_s)}"


def _path_on(path: str, node: Node) -> Path:
    """Return the absolute path on a node, whose name takes the place of `{node}`."""
    return Path(path.replace("{node}", node.name)).absolute()
