"""Checks of the cluster's tier, where an [[origin]] table names one."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from shardcache.cli.doctor.context import Context
from shardcache.cli.doctor.findings import Finding, failed, ok, warning
from shardcache.cluster.nginx import OTHERS, PEERS, STATUS
from shardcache.cluster.tier import expiry_warning
from shardcache.origin.tier_client import reason_to_bypass
from shardcache.units import size

_LIMIT_S = 5.0
_AT_ONCE = 16
_LEAST_FREE_BYTES = 1 << 30
# Object stores refuse signatures of a clock that is 15 minutes off.
_MOST_SKEW_S = 60.0
_OTHERS = "shardcache cluster status --nodes /etc/shardcache/tier/nodes   # compares all nodes"


@dataclass(frozen=True, slots=True)
class _Answer:
    """One node's answer, by way of this node's nginx.

    Attributes:
        peers: its view of the cluster.
        figures: what `shardcache cluster run` publishes there; None if nginx was started otherwise.
        skew_s: its clock minus this machine's.
    """

    peers: Mapping[str, Any]
    figures: Mapping[str, Any] | None
    skew_s: float


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
        own = _ask(address, PEERS, STATUS)
        count, digest = int(own.peers["peers"]), str(own.peers["digest"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as exn:
        cause = f"{exn}; shards come from the object store"
        yield failed(f"the tier at {address} does not answer", cause, "systemctl status shardcache-tier")
        return
    view = f"nginx at {address} is one of {count} nodes, digest {digest}"
    if own.figures is None:
        yield warning(view, "it was started without `shardcache cluster run`: no figures", _OTHERS)
    elif own.figures["free_bytes"] < _LEAST_FREE_BYTES:
        cause = f"{size(own.figures['free_bytes'])} are free on its disk: parts are evicted early"
        yield warning(view, cause, "lower --max-size of the tier, or the daemon's --capacity")
    else:
        cached, free = (size(own.figures[name]) for name in ("cached_bytes", "free_bytes"))
        yield ok(f"{view}; {cached} cached, {free} free")
    yield from _published("this node", own.figures)
    name = str(own.peers["node"])
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for found in threads.map(lambda number: _other(address, number, digest, name), range(count)):
            yield from found


def _other(address: str, number: int, digest: str, own_name: str) -> list[Finding]:
    path = f"{OTHERS}/{number}"
    try:
        answer = _ask(address, f"{path}/peers", f"{path}/status")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        cause = "other nodes fetch its shards in its place"
        return [failed(f"node {number + 1} of the tier does not answer", cause, _OTHERS)]
    name, found = answer.peers["node"], []
    if answer.peers["digest"] != digest:
        cause = "some shards are fetched and cached more than once"
        found.append(failed(f"{name} has another list of the tier's nodes", cause, _OTHERS))
    if abs(answer.skew_s) > _MOST_SKEW_S:
        way = "ahead of" if answer.skew_s > 0 else "behind"
        cause = "object stores refuse signatures of a clock that is 15 minutes off"
        found.append(warning(f"the clock of {name} is {abs(answer.skew_s):.0f} s {way} this one", cause, "timedatectl"))
    return found if name == own_name else [*found, *_published(name, answer.figures)]


def _published(name: str, figures: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield what a node says about its own list and certificates."""
    found = figures or {}
    if reason := found.get("stale"):
        yield failed(f"{name} uses a former list of nodes, or former certificates", str(reason), _OTHERS)
    if expiring := expiry_warning(found.get("certificate_expires_s")):
        cause = "without one, no other node gets shards from it, nor it from them"
        yield warning(f"{name}: {expiring}", cause, "shardcache cluster certificates; then copy the nodes' folders")


def _ask(address: str, peers_path: str, status_path: str) -> _Answer:
    """Return a node's answer. Raises OSError, HTTPException, ValueError and KeyError."""
    peers = _get(address, peers_path)
    if peers is None:
        raise ValueError("it is not the nginx of a tier")
    return _Answer(peers, _get(address, status_path), peers["time_s"] - time.time())


def _get(address: str, path: str) -> dict[str, Any] | None:
    """Return a JSON object; None if there is none. Raises OSError, HTTPException and ValueError."""
    with closing(http.client.HTTPConnection(address, timeout=_LIMIT_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        found: dict[str, Any] | None = json.loads(answer.read()) if answer.status == 200 else None
        return found
