"""Checks of the cluster's tier, where an [[origin]] table names one."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any

from shardcache.cache.operations.origin_probe.findings import Finding, failed, ok, warning
from shardcache.cli.doctor.context import Context
from shardcache.cluster.nginx import PEERS, STATUS
from shardcache.units import size

_LIMIT_S = 5.0
_LEAST_FREE_BYTES = 1 << 30
_OTHERS = "shardcache cluster status --nodes /etc/shardcache/tier/nodes   # compares all nodes"


def reach(context: Context) -> list[Finding]:
    """Ask this node's nginx for its view of the cluster, and for the space on its disk."""
    tables = () if context.settings is None else context.settings.origin
    return [_look(address) for address in dict.fromkeys(table.tier for table in tables if table.tier)]


def _look(address: str) -> Finding:
    try:
        peers, figures = _get(address, PEERS), _get(address, STATUS)
        if peers is None:
            raise ValueError("it is not the nginx of a tier")
        view = f"nginx at {address} is one of {peers['peers']} nodes, digest {peers['digest']}"
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as exn:
        cause = f"{exn}; shards come from the object store"
        return failed(f"the tier at {address} does not answer", cause, "systemctl status shardcache-tier")
    if figures is None:
        return warning(view, "it was started without `shardcache cluster run`: no figures", _OTHERS)
    if figures["free_bytes"] < _LEAST_FREE_BYTES:
        cause = f"{size(figures['free_bytes'])} are free on its disk: parts are evicted early"
        return warning(view, cause, "lower --max-size of the tier, or the daemon's --capacity")
    return ok(f"{view}; {size(figures['cached_bytes'])} cached, {size(figures['free_bytes'])} free")


def _get(address: str, path: str) -> dict[str, Any] | None:
    """Return a JSON object from the front; None if there is none. Raises OSError, HTTPException and ValueError."""
    with closing(http.client.HTTPConnection(address, timeout=_LIMIT_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        found: dict[str, Any] | None = json.loads(answer.read()) if answer.status == 200 else None
        return found
