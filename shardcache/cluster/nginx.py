"""A node's nginx.conf, from the template beside this file. Pure.

In the template, `@name` stands for a value, and `@@` for `@`. A line that begins with `[name]` is repeated for each
node or store, or stands only where the feature is in use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier import MIB, PEER_NAME, Tier, Tls, Upstream
from shardcache.errors import ConfigError
from shardcache.origin.registry import QUESTION

PEERS = "/.shardcache/peers"
STATUS = "/.shardcache/status"
STATUS_FILE = "status.json"
ACCESS_LOG = "access.log"
PID_FILE = "nginx.pid"

_IDLE_S = 5
_WAIT = 180
_MAX_S = 30 * 86400
_PART_BYTES = 8 * MIB
_KEYS_PER_MIB = 8000
_MIN_KEYS_MIB = 16
_MIN_OWNERS_KIB, _KIB_PER_OWNER = 256, 2  # nginx needs 0.9 KiB for each
_SPECIAL = re.compile(r"[$\"'\\\x00-\x1f]")
_SIGNATURE = r"X-Amz-(Algorithm|Credential|Date|Expires|Security-Token|Signature|SignedHeaders)=[\w%/+=.~-]*"
_LINE = re.compile(r"( *)(?:\[(\w+)\] )?(.*)")

Rows = list[Mapping[str, object]]


def time_limits(stall_timeout_s: float) -> dict[str, int]:
    """Return nginx's limits of time in milliseconds, all of which follow from the daemon's stall time-out.

    `connect_ms` is to connect to an owner, TLS handshakes included: an owner whose processors are busy is not lost, and
    whoever took over from it would fetch the part a second time. `tries_ms` is to find another owner; `answer_ms` for
    an owner to answer whether it lives, which the daemon asks as long as no part comes; `store_ms` for the object store
    to send the next bytes; `wait_ms` for a part that another request fetches, which only ends what hangs; `front_ms`
    for the first or next bytes from an owner, which sends none while it waits.

    Raises ConfigError if they contradict each other.
    """
    asked_ms, store_ms = 1000 * QUESTION * stall_timeout_s, round(1000 * stall_timeout_s)
    connect_ms, wait_ms = round(0.8 * asked_ms), round(_WAIT * 1000 * stall_timeout_s)
    if 0 < connect_ms < asked_ms and 2 * asked_ms < store_ms < wait_ms and wait_ms + store_ms < 1000 * _MAX_S:
        limits = {"connect_ms": connect_ms, "tries_ms": 3 * connect_ms, "answer_ms": connect_ms}
        return limits | {"store_ms": store_ms, "wait_ms": wait_ms, "front_ms": wait_ms + store_ms}
    raise ConfigError(
        f"no time limits follow from a stall time-out of {stall_timeout_s:g} s",
        remedy="use that of the daemons, such as 20",
    )


class _Line(Template):
    delimiter = "@"  # nginx's own variables begin with $


def render(tier: Tier, node: Node) -> str:
    """Return the nginx.conf of a node. Raises ConfigError."""
    values, rows = _values(tier, node), _rows(tier, node)
    return "".join(f"{line}\n" for source in _template() for line in _expanded(source, values, rows))


@cache
def _template() -> list[str]:
    return files("shardcache.cluster").joinpath("nginx.conf.template").read_text().splitlines()


def _expanded(source: str, values: Mapping[str, object], rows: Mapping[str, Rows]) -> Iterator[str]:
    found = _LINE.fullmatch(source)
    assert found is not None
    indent, name, text = found.groups()
    line = _Line(text)
    for row in rows[name] if name else [{}]:
        yield indent + line.substitute(values, **row)


def _values(tier: Tier, node: Node) -> dict[str, object]:
    owner = node.at(tier.owner_port) if tier.listen is None else Node(node.name, tier.listen).at(tier.owner_port)
    facts = json.dumps({"node": node.name, "peers": len(tier.nodes), "digest": tier.digest})
    return {
        "workers": tier.workers,
        "signature": _SIGNATURE,
        "cache": _path(tier.cache(node)),
        "run": _path(tier.run(node)),
        "keys_mib": max(_MIN_KEYS_MIB, math.ceil(2 * tier.max_size_bytes / _PART_BYTES / _KEYS_PER_MIB)),
        "max_size": _mebibytes(tier.max_size_bytes),
        "min_free": _mebibytes(tier.min_free_bytes),
        "permitted_s": max(tier.trust_s, 1),
        "owners_kib": _MIN_OWNERS_KIB + len(tier.nodes) * _KIB_PER_OWNER,
        "hashed": "$http_host$path" if tier.spread == "shard" else "$http_host$path$http_range",
        "front": tier.front,
        "own": node.at(tier.owner_port),
        "owner": owner if tier.tls is None else f"{owner} ssl",
        "scheme": "http" if tier.tls is None else "https",
        "peers": f'{facts[:-1]}, "time_s": $msec}}',
        "idle_s": _IDLE_S,
        "pooled_s": _IDLE_S - 1,
        **time_limits(tier.stall_timeout_s),
    }


def _rows(tier: Tier, node: Node) -> dict[str, Rows]:
    servers = (*tier.resolvers, *(() if tier.ipv6 else ("ipv6=off",)))
    stores, tls, store_ca = tier.stores, tier.tls_of(node), {"store_ca": _path(tier.store_ca)}
    return {
        "user": [{"user": tier.user}] if tier.user else [],
        "resolved": [{"resolvers": " ".join(servers)}] if tier.resolvers else [],
        "outage": [{"outage_s": tier.outage_s}] if tier.outage_s else [],
        "trusted": [{"trust_s": tier.trust_s}] if tier.trust_s else [],
        "nodes": [{"server": each.at(tier.owner_port)} for each in tier.nodes],
        "stores": [{"pattern": _host_pattern(store), "url": _url(tier, store), "host": store.host} for store in stores],
        "addresses": [
            {"group": _group(tier, store), "server": store.server} for store in stores if _is_group(tier, store)
        ],
        "https": [store_ca] if any(store.scheme == "https" for store in stores) else [],
        "tls": [] if tls is None else [_files(tls)],
    }


def _files(tls: Tls) -> Mapping[str, object]:
    return {"certificate": _path(tls.certificate), "key": _path(tls.key), "ca": _path(tls.ca), "peer_name": PEER_NAME}


def _host_pattern(store: Upstream) -> str:
    host = re.escape(store.authority).replace("\\-", "-")
    below = "" if store.is_address else "([a-z0-9_-]+[.])*"
    return f"~*^{below}{host}$"


def _is_group(tier: Tier, store: Upstream) -> bool:
    """Return True if nginx knows the store's addresses when it starts."""
    return store.is_address or not tier.resolvers


def _url(tier: Tier, store: Upstream) -> str:
    return f"{store.scheme}://{_group(tier, store) if _is_group(tier, store) else '$http_host'}"


def _group(tier: Tier, store: Upstream) -> str:
    return f"store-{tier.stores.index(store)}"


def _path(path: Path) -> str:
    text = str(path)
    if _SPECIAL.search(text):
        raise ConfigError("nginx cannot use a path with $, quotes or line breaks", url=text, remedy="choose another")
    return text


def _mebibytes(value_bytes: int) -> str:
    return f"{max(1, value_bytes // MIB)}m"
