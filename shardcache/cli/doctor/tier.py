"""Checks of the cluster's tier, where an [[origin]] table names one."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from shardcache.cli.doctor.context import Context, Finding, failed, ok, warning
from shardcache.cluster.nginx import OTHERS, PEERS, STATUS
from shardcache.cluster.tier import expiry_warning
from shardcache.origin.tier_client import reason_to_bypass
from shardcache.units import size

_LIMIT_S = 5.0
_AT_ONCE = 16
_MIN_FREE_BYTES = 1 << 30
# Object stores refuse signatures of a clock that is 15 minutes off.
_MAX_SKEW_S = 60.0
_COMPARE = "shardcache cluster status --nodes /etc/shardcache/tier/nodes   # compares all nodes"
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError)


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
    """Ask this node's nginx, and by way of it those of the other nodes."""
    tables = () if context.settings is None else context.settings.origin
    addresses = dict.fromkeys(table.tier for table in tables if table.tier)
    return [finding for address in addresses for finding in _look(address)]


def _look(address: str) -> Iterator[Finding]:
    try:
        own, figures = _get(address, PEERS), _get(address, STATUS)
        if not own:
            raise ValueError("it is not the nginx of a tier")
        view = f"nginx at {address} is one of {own['peers']} nodes, digest {own['digest']}"
    except _NO_ANSWER as exn:
        cause = f"{exn}; shards come from the object store"
        yield failed(f"the tier at {address} does not answer", cause, "systemctl status shardcache-tier")
        return
    if not figures:
        yield warning(view, "it was started without `shardcache cluster run`: no figures", _COMPARE)
    elif figures["free_bytes"] < _MIN_FREE_BYTES:
        cause = f"{size(figures['free_bytes'])} are free on its disk: parts are evicted early"
        yield warning(view, cause, "lower --max-size of the tier, or the daemon's --capacity")
    else:
        yield ok(f"{view}; {size(figures['cached_bytes'])} cached, {size(figures['free_bytes'])} free")
    yield from _published("this node", figures)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for found in threads.map(lambda number: list(_other(address, number, own)), range(own["peers"])):
            yield from found


def _other(address: str, number: int, own: Mapping[str, Any]) -> Iterator[Finding]:
    path = f"{OTHERS}/{number}"
    try:
        peers, figures = _get(address, f"{path}/peers"), _get(address, f"{path}/status")
        name, skew_s = peers["node"], peers["time_s"] - time.time()
    except _NO_ANSWER:
        cause = "other nodes fetch its shards in its place"
        yield failed(f"node {number + 1} of the tier does not answer", cause, _COMPARE)
        return
    if peers["digest"] != own["digest"]:
        cause = "some shards are fetched and cached more than once"
        yield failed(f"{name} has another list of the tier's nodes", cause, _COMPARE)
    if abs(skew_s) > _MAX_SKEW_S:
        found = f"the clock of {name} is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this one"
        yield warning(found, "object stores refuse signatures of a clock that is 15 minutes off", "timedatectl")
    if name != own["node"]:
        yield from _published(name, figures)


def _published(name: str, figures: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what a node says about its own list and certificates."""
    if reason := figures.get("stale"):
        yield failed(f"{name} uses a former list of nodes, or former certificates", str(reason), _COMPARE)
    if expiring := expiry_warning(figures.get("certificate_expires_s")):
        cause = "without one, no other node gets shards from it, nor it from them"
        yield warning(f"{name}: {expiring}", cause, "shardcache cluster certificates; then copy the nodes' folders")


def _get(address: str, path: str) -> dict[str, Any]:
    """Return a JSON object; empty if there is none. Raises OSError, HTTPException and ValueError."""
    with closing(http.client.HTTPConnection(address, timeout=_LIMIT_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read()) if answer.status == 200 else {}
        return found
