"""Checks of the cluster's tier, where an [[origin]] table names one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from shardcache.cli.doctor.context import Context, Finding, failed, ok, warning
from shardcache.cluster.nginx import PEERS, STATUS
from shardcache.cluster.tier import expiry_warning
from shardcache.origin.tier_client import reason_to_bypass
from shardcache.units import size

_LIMIT_S = 5.0
_MIN_FREE_BYTES = 1 << 30
_COMPARE = "shardcache cluster status --nodes /etc/shardcache/tier/nodes   # compares all nodes"


def bypasses(context: Context) -> list[Finding]:
    """Name the origins that have a tier and cannot use it."""
    return [
        warning(
            f"{table.match} bypasses the tier {table.tier}",
            reason,
            f"remove `tier` from the [[origin]] table of {table.match}, or what keeps it from being used",
        )
        for table in (() if context.settings is None else context.settings.origin)
        if table.tier and (reason := reason_to_bypass(table))
    ]


def reach(context: Context) -> list[Finding]:
    """Ask this node's nginx; `cluster status` compares all nodes."""
    tables = () if context.settings is None else context.settings.origin
    addresses = dict.fromkeys(table.tier for table in tables if table.tier)
    return [finding for address in addresses for finding in _look(address)]


def _look(address: str) -> Iterator[Finding]:
    try:
        own, figures = _get(address, PEERS), _get(address, STATUS)
        if not own:
            raise ValueError("it is not the nginx of a tier")
    except (OSError, http.client.HTTPException, ValueError) as exn:
        cause = f"{exn}; shards come from the object store"
        yield failed(f"the tier at {address} does not answer", cause, "systemctl status shardcache-tier")
        return
    view = f"nginx at {address} is one of {own['peers']} nodes, digest {own['digest']}"
    if not figures:
        yield warning(view, "it was started without `shardcache cluster run`: no figures", _COMPARE)
    elif figures["free_bytes"] < _MIN_FREE_BYTES:
        cause = f"{size(figures['free_bytes'])} are free on its disk: parts are evicted early"
        yield warning(view, cause, "lower --max-size of the tier, or the daemon's --capacity")
    else:
        yield ok(f"{view}; {size(figures['cached_bytes'])} cached, {size(figures['free_bytes'])} free")
    if reason := figures.get("stale"):
        yield failed("this node uses a former list of nodes, or former certificates", str(reason), _COMPARE)
    if expiring := expiry_warning(figures.get("certificate_expires_s")):
        cause = "without one, no other node gets shards from it, nor it from them"
        yield warning(f"this node: {expiring}", cause, "shardcache cluster certificates; then copy the nodes' folders")


def _get(address: str, path: str) -> dict[str, Any]:
    """Return a JSON object; empty if there is none. Raises OSError, HTTPException and ValueError."""
    with closing(http.client.HTTPConnection(address, timeout=_LIMIT_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read()) if answer.status == 200 else {}
        return found
