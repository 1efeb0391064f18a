"""State of a cluster's tier: `shardcache cluster status` asks every node at its owner port.

The owner port is the port at which nginx serves the other nodes.
"""

import asyncio
import ssl
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any

import aiohttp

from shardcache.cluster.access_log import TierFigures
from shardcache.cluster.node_list import Node
from shardcache.cluster.tier_config import Tls, expiry_warning
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.front import PEERS, STATUS

# Many nodes are asked at the same time, since each node that is down takes the whole time limit,
# and often many are down at once.
_MAX_CONNECTIONS = 512
# Keys that the figures of a node must have.
_REQUIRED_FIGURES = {"free_bytes", *(field.name for field in fields(TierFigures))}
_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """State of one node, from its answers.

    Attributes:
        node: the node that was asked.
        peers: the node's view of the cluster: `node`, its name; `peers`, the number of nodes; and
            `digest`, a hash of the list of nodes (`Tier.digest`). None if the node is down.
        figures: the figures that `shardcache cluster run` publishes; None if nginx was started in
            another way, or is down.
        error: reason why the node counts as down; None if it is up.
    """

    node: Node
    peers: dict[str, Any] | None = None
    figures: dict[str, Any] | None = None
    error: str | None = None

    @property
    def hit_share(self) -> float | None:
        """Share of the bytes sent by the node that came from its disk; None if it sent none."""
        if self.figures is None:
            return None
        cached_bytes: int = self.figures["from_tier_bytes"]
        fetched_bytes: int = self.figures["from_store_bytes"]
        sent_bytes = cached_bytes + fetched_bytes
        if sent_bytes == 0:
            return None
        return cached_bytes / sent_bytes

    @property
    def state(self) -> str:
        """State in words: up, down with the reason, or a list of warnings."""
        if self.error is not None:
            return f"down: {self.error}"
        figures = self.figures or {}
        warnings = (self.stale, expiry_warning(figures.get("certificate_expires_s")))
        return ", ".join(filter(None, warnings)) or "up"

    @property
    def stale(self) -> str | None:
        """Reason why the node uses an old list of nodes or old certificates; None otherwise."""
        reason = (self.figures or {}).get("stale")
        return f"uses an old list: {reason}" if reason else None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "node": self.node.name,
            "address": self.node.address,
            "up": self.peers is not None,
            "error": self.error,
            "stale": self.stale,
            "digest": None if self.peers is None else self.peers["digest"],
            "hit_share": self.hit_share,
            "figures": self.figures,
        }


async def ask(
    nodes: tuple[Node, ...],
    owner_port: int,
    tls: Tls | None,
    limit_s: float = _LIMIT_S,
) -> list[NodeReport]:
    """Return the reports of all nodes, in their order.

    Args:
        nodes: the nodes to ask.
        owner_port: the port at which each node serves the others.
        tls: the files of mutual TLS on this node; None for plain HTTP between the nodes.
        limit_s: time limit for connecting to a node, and for each wait for bytes of its answers.

    Raises ConfigError if the certificates cannot be used.
    """
    context = _context(tls) if tls is not None else None
    limits = aiohttp.ClientTimeout(total=None, sock_connect=limit_s, sock_read=limit_s)
    connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as http:
        questions = []
        for node in nodes:
            tls_options: dict[str, Any] = {}
            if tls is not None:
                tls_options = {"ssl": context, "server_hostname": tls.name_of(node)}
            questions.append(_ask(http, node, node.at(owner_port), tls_options))
        return list(await asyncio.gather(*questions))


async def _ask(
    http: aiohttp.ClientSession,
    node: Node,
    address: str,
    tls_options: dict[str, Any],
) -> NodeReport:
    """Ask a node, and return its report.

    Args:
        http: the session for the requests.
        node: the node.
        address: HOST:PORT of the node's owner port.
        tls_options: arguments of the requests; empty for plain HTTP.
    """
    scheme = "https" if tls_options else "http"
    base = f"{scheme}://{address}"
    try:
        async with http.get(base + PEERS, allow_redirects=False, **tls_options) as answer:
            peers = await _peers_in(answer)
        async with http.get(base + STATUS, allow_redirects=False, **tls_options) as answer:
            figures = await _figures_in(answer)
    except TimeoutError:
        return NodeReport(node, error="no answer")
    except (aiohttp.ClientError, OSError, ValueError) as exn:
        return NodeReport(node, error=str(exn) or type(exn).__name__)
    return NodeReport(node, peers, figures)


async def _peers_in(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the page `PEERS`. Raises ValueError if the answer is another one."""
    if answer.status == HTTPStatus.FORBIDDEN:
        raise ValueError("it refuses the name of this node's certificate")
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"status {answer.status}: not this tier")
    peers = await answer.json()
    match peers:
        case {"digest": str(), "peers": int()}:
            return peers  # type: ignore[no-any-return]
    raise ValueError("not this tier")


async def _figures_in(answer: aiohttp.ClientResponse) -> dict[str, Any] | None:
    """Return the page `STATUS`; None if the answer is another one."""
    if answer.status != HTTPStatus.OK:
        return None
    # nginx serves the page from a file, with the content type of any file.
    page = await answer.json(content_type=None)
    if isinstance(page, dict) and page.keys() >= _REQUIRED_FIGURES:
        return page
    return None


def _context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context of a client with this node's certificate. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as exn:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"the certificates of the tier cannot be used: {exn.strerror or exn}",
            url=str(tls.certificate),
            remedy="run it on a node of the cluster as a user who may read its key, or name the "
            "files: --ca, --certificate, --key",
        ) from None
    return context
