"""State of a cluster's tier, asked of the owner port of every node."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any

import aiohttp

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier_config import Tls, expiry_warning
from shardcache.errors import ConfigError
from shardcache.shared.front import PEERS, STATUS

# Nodes that are down are many at once, and the others do not wait for them: at most these are asked
# at a time.
_AT_ONCE = 512
_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Answer of one node.

    Attributes:
        node: that was asked.
        peers: its view of the cluster: `node`, `peers` and `digest`; None if it is down.
        figures: what `shardcache cluster run` publishes; None if nginx was started otherwise, or is
            down.
        error: the reason that it is down.
    """

    node: Node
    peers: dict[str, Any] | None = None
    figures: dict[str, Any] | None = None
    error: str | None = None

    @property
    def hit_share(self) -> float | None:
        """Share of its bytes that came from its disk; None before the first."""
        if self.figures is None:
            return None
        cached = self.figures["from_tier_bytes"]
        fetched = self.figures["from_store_bytes"]
        sent = cached + fetched
        return cached / sent if sent else None

    @property
    def state(self) -> str:
        """State in words: up, down, or what an operator has to do about it."""
        if self.error is not None:
            return f"down: {self.error}"
        figures = self.figures or {}
        warnings = (self.stale, expiry_warning(figures.get("certificate_expires_s")))
        return ", ".join(filter(None, warnings)) or "up"

    @property
    def stale(self) -> str | None:
        """Reason that it does not use its list of nodes and certificates as they are now."""
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
            "digest": self.peers and self.peers["digest"],
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

    `limit_s` limits a node's connection, and each of its answers.

    Raises ConfigError if the certificates cannot be used.
    """
    context = None if tls is None else _context(tls)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=limit_s, sock_read=limit_s)
    connector = aiohttp.TCPConnector(limit=_AT_ONCE)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as http:
        questions = []
        for node in nodes:
            secured: dict[str, Any] = {}
            if tls is not None:
                secured = {"ssl": context, "server_hostname": tls.name_of(node)}
            questions.append(_ask(http, node, node.at(owner_port), secured))
        return list(await asyncio.gather(*questions))


async def _ask(
    http: aiohttp.ClientSession,
    node: Node,
    address: str,
    secured: dict[str, Any],
) -> NodeReport:
    scheme = "https" if secured else "http"
    base = f"{scheme}://{address}"
    try:
        async with http.get(base + PEERS, allow_redirects=False, **secured) as answer:
            if answer.status == 403:
                return NodeReport(node, error="it refuses the name of this node's certificate")
            if answer.status != 200:
                return NodeReport(node, error=f"status {answer.status}: not this tier")
            peers = await answer.json()
        async with http.get(base + STATUS, allow_redirects=False, **secured) as answer:
            figures = await answer.json(content_type=None) if answer.status == 200 else None
    except TimeoutError:
        return NodeReport(node, error="no answer")
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as exn:
        return NodeReport(node, error=str(exn) or type(exn).__name__)
    return NodeReport(node, peers, figures)


def _context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as exn:  # ssl.SSLError is one
        raise ConfigError(
            f"the certificates of the tier cannot be used: {exn.strerror or exn}",
            url=str(tls.certificate),
            remedy="run it on a node of the cluster as a user who may read its key, or name the "
            "files: --ca, --certificate, --key",
        ) from None
    return context
