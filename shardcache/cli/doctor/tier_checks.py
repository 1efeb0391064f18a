"""Checks of the cluster's tier for `shardcache doctor`, if an [[origin]] table names a tier.

The tier is a cache that the nodes of a cluster share: an nginx on each node, between the daemons
and the object store. A daemon bypasses the tier if its options do not allow it to use the tier.
"""

from collections.abc import Iterator

from shardcache.cli.doctor.context import Context, Finding, failed, ok, skipped, warning
from shardcache.cluster.tier_config import expiry_warning
from shardcache.origin.registry import reason_to_bypass
from shardcache.shared.front import PEERS, STATUS, page
from shardcache.shared.units import size

_TIER_LIMIT_S = 5.0
_MIN_FREE_BYTES = 1 << 30  # minimum free space on the disk of the tier's cache
_COMPARE_NODES = (
    "shardcache cluster status --nodes /etc/shardcache/tier/nodes   # compares all nodes"
)


def bypasses(context: Context) -> list[Finding]:
    """Return a warning for each [[origin]] table that names a tier and cannot use it."""
    findings = []
    tables = () if context.settings is None else context.settings.origin
    for table in tables:
        reason = reason_to_bypass(table) if table.tier else None
        if reason:
            remedy = (
                f"remove `tier` from the [[origin]] table of {table.match}, "
                "or the option that prevents it"
            )
            found = f"{table.match} bypasses the tier {table.tier}"
            findings.append(warning(found, reason, remedy))
    return findings


def reach(context: Context) -> list[Finding]:
    """Check this node's nginx. The nodes of a cluster are compared by `cluster status`."""
    tables = () if context.settings is None else context.settings.origin
    addresses = dict.fromkeys(table.tier for table in tables if table.tier)
    return [finding for address in addresses for finding in _nginx_findings(address, context.uid)]


def _nginx_findings(address: str, uid: int | None) -> Iterator[Finding]:
    """Yield the findings about the nginx at a socket.

    Args:
        address: path of the socket.
        uid: id of the user that the daemon runs as; None if unknown.
    """
    try:
        peers = page(address, PEERS, _TIER_LIMIT_S, uid)
        figures = page(address, STATUS, _TIER_LIMIT_S, uid)
        if peers is None:
            raise ValueError("it is not the nginx of a tier")
    except PermissionError:
        yield skipped(f"only the daemon's user and root reach the tier at {address}")
        return
    except (OSError, ValueError) as exn:
        cause = f"{exn}; shards come from the object store"
        yield failed(
            f"the tier at {address} does not answer", cause, "systemctl status shardcache-tier"
        )
        return
    view = f"nginx at {address} is one of {peers['peers']} nodes, digest {peers['digest']}"
    if not figures:
        yield warning(
            view, "it was started without `shardcache cluster run`: no figures", _COMPARE_NODES
        )
        return
    if figures["free_bytes"] < _MIN_FREE_BYTES:
        cause = f"{size(figures['free_bytes'])} are free on its disk: parts are evicted early"
        yield warning(view, cause, "lower --max-size of the tier, or the daemon's --capacity")
    else:
        yield ok(
            f"{view}; {size(figures['cached_bytes'])} cached, {size(figures['free_bytes'])} free"
        )
    if reason := figures.get("stale"):
        yield failed(
            "this node uses an old list of nodes, or old certificates", str(reason), _COMPARE_NODES
        )
    if expiring := expiry_warning(figures.get("certificate_expires_s")):
        cause = "without one, no other node gets shards from it, nor it from them"
        yield warning(
            f"this node: {expiring}",
            cause,
            "shardcache cluster certificates; then copy the nodes' folders",
        )
