"""Checks of the cluster's tier for `shardcache doctor`, if an [[origin]] table names a tier.

The tier is a cache that the nodes of a cluster share: an nginx on each node, between the daemons
and the object store. nginx listens at a socket, which an [[origin]] table names as its `tier`. A
daemon bypasses the tier if other options of the table do not allow it to use the tier.
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


def check_bypasses(context: Context) -> list[Finding]:
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


def check_nginx(context: Context) -> list[Finding]:
    """Check this node's nginx. The nodes of a cluster are compared by `cluster status`."""
    tables = () if context.settings is None else context.settings.origin
    addresses = {table.tier: None for table in tables if table.tier}  # each once, in order
    findings: list[Finding] = []
    for address in addresses:
        findings += _nginx_findings(address, context.uid)
    return findings


def _nginx_findings(address: str, uid: int | None) -> Iterator[Finding]:
    """Yield the findings about the nginx at a socket.

    nginx serves two pages, JSON objects: PEERS, its view of the cluster, and STATUS, the figures
    that `shardcache cluster run` publishes.

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
        remedy = "systemctl status shardcache-tier"
        yield failed(f"the tier at {address} does not answer", cause, remedy)
        return
    found = f"nginx at {address} is one of {peers['peers']} nodes, digest {peers['digest']}"
    if not figures:
        cause = "it was started without `shardcache cluster run`: no figures"
        yield warning(found, cause, _COMPARE_NODES)
        return

    free = size(figures["free_bytes"])
    if figures["free_bytes"] < _MIN_FREE_BYTES:
        cause = f"{free} are free on its disk: parts are evicted early"
        yield warning(found, cause, "lower --max-size of the tier, or the daemon's --capacity")
    else:
        yield ok(f"{found}; {size(figures['cached_bytes'])} cached, {free} free")
    stale_reason = figures.get("stale")
    if stale_reason:
        yield failed(
            "this node uses an old list of nodes, or old certificates",
            str(stale_reason),
            _COMPARE_NODES,
        )
    expiry = expiry_warning(figures.get("certificate_expires_s"))
    if expiry:
        yield warning(
            f"this node: {expiry}",
            "without a valid certificate, it exchanges no shards with other nodes",
            "shardcache cluster certificates; then copy the nodes' folders",
        )
