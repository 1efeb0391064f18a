"""`Tier`: everything that the nodes of one cluster have in common, and the object stores behind it."""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from shardcache.cluster.node_list import Node
from shardcache.errors import ConfigError
from shardcache.units import duration

MIB = 1024 * 1024

FRONT = "127.0.0.1:9080"
OWNER_PORT = 9081
CACHE_DIR = "/var/cache/shardcache-tier"
RUN_DIR = "/run/shardcache-tier"

PEER_NAME = "shardcache-tier"
"""Name in the certificate of every node: a node trusts whoever the cluster's authority gave this name."""

_WARNED_S = 30 * 86400.0

NODE_PLACEHOLDER = "{node}"

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Upstream:
    """One object store or web server behind the tier: the only hosts that it connects to.

    Attributes:
        scheme: "http" or "https".
        host: its host, in lower case.
        port: None for the scheme's own.
    """

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, url: str) -> Upstream:
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

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"

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
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of mutual TLS between the nodes."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Configuration of a cluster's tier.

    In paths, `{node}` stands for the node's name.

    Attributes:
        nodes: all nodes; each has the same list.
        stores: the only hosts that the tier connects to.
        front: HOST:PORT at which nginx serves the daemon of its node.
        owner_port: port at which nginx serves the other nodes.
        listen: address at which it does so; None for the node's own.
        cache_dir: folder on a local disk for the parts that a node owns, and for its logs.
        run_dir: folder in memory (tmpfs) for permissions, which contain signed urls.
        max_size_bytes: maximum size of the cached parts.
        min_free_bytes: space always kept free on the cache's filesystem.
        spread: "shard" if one node owns all parts of a shard, "part" if parts are distributed.
        trust_s: time for which the store's permission for a signed url is cached.
        outage_s: time for which a permission is good while the store fails.
        stall_timeout_s: the daemon's option of that name.
        tls: None for plain HTTP between the nodes.
        store_ca: certificates of authorities to trust for https stores.
        resolvers: DNS servers for the names of stores, as addresses with or without a port, those of IPv6 in brackets;
            empty if nginx resolves the names when it starts.
        ipv6: False for the IPv4 addresses of these names alone.
        user: user of nginx' workers if it is started by root; None for nginx' default.
        workers: number of nginx' worker processes.
    """

    nodes: tuple[Node, ...]
    stores: tuple[Upstream, ...]
    front: str = FRONT
    owner_port: int = OWNER_PORT
    listen: str | None = None
    cache_dir: str = CACHE_DIR
    run_dir: str = RUN_DIR
    max_size_bytes: int = 100_000 * MIB
    min_free_bytes: int = 5_000 * MIB
    spread: Literal["shard", "part"] = "shard"
    trust_s: int = 300
    outage_s: int = 0
    stall_timeout_s: float = 20.0
    tls: Tls | None = None
    store_ca: Path = Path("/etc/ssl/certs/ca-certificates.crt")
    resolvers: tuple[str, ...] = ()
    ipv6: bool = True
    user: str | None = None
    workers: int = 4

    def __post_init__(self) -> None:
        hosts = [store.authority for store in self.stores]
        if twice := next((host for host in hosts if hosts.count(host) > 1), None):
            raise ConfigError(f"two stores have the host {twice}", remedy="name each store once")

    @property
    def digest(self) -> str:
        """Hash of what all nodes have to agree on: who they are, and who owns what."""
        peers = sorted(node.at(self.owner_port) for node in self.nodes)
        return hashlib.sha256("\n".join((self.spread, *peers)).encode()).hexdigest()[:16]

    def node(self, name: str) -> Node:
        """Return a node by its name or address. Raises ConfigError."""
        for node in self.nodes:
            if name in (node.name, node.address):
                return node
        known = ", ".join(node.name for node in self.nodes[:5])
        raise ConfigError(f"{name} is not among the nodes", remedy=f"name one of the {len(self.nodes)}: {known}")

    def cache(self, node: Node) -> Path:
        """Return the cache folder on a node."""
        return _filled(self.cache_dir, node)

    def run(self, node: Node) -> Path:
        """Return the folder in memory on a node."""
        return _filled(self.run_dir, node)

    def tls_of(self, node: Node) -> Tls | None:
        """Return the PEM files on a node."""
        if self.tls is None:
            return None
        files = (self.tls.ca, self.tls.certificate, self.tls.key)
        return Tls(*(_filled(str(file), node) for file in files))


def expiry_warning(expires_s: float | None) -> str | None:
    """Return a warning if a certificate, which expires at that time, has to be renewed soon; None if it has not."""
    left_s = math.inf if expires_s is None else expires_s - time.time()
    if left_s > _WARNED_S:
        return None
    return f"certificate expires in {duration(left_s)}" if left_s > 0 else "certificate has expired"


def _filled(path: str, node: Node) -> Path:
    return Path(path.replace(NODE_PLACEHOLDER, node.name)).absolute()
