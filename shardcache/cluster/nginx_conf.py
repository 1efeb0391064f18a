"""The nginx.conf of one node.

It comes from the template beside this file, in which `@name` stands for a value, and `@@` for `@`.
A line that begins with `[name]` is repeated for each node or store, or stands only where the
feature is in use.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier_config import MAX_COMMON_NAME, MIB, PEER_NAME, Tier, Upstream
from shardcache.errors import ConfigError
from shardcache.origin.tier.tier_state import QUESTION
from shardcache.shared.unix_socket import MAX_SOCKET_BYTES

_LEASES_MIB = 16  # room for some 50,000 parts that are in hand at the same time
# Of the time for which a permission is good, owners of parts may have a copy of another node's for
# a tenth.
_COPIED_SHARE = 10
# An owner may send nothing for so many stall time-outs.
_MAX_STALLS = 180
_MAX_S = 30 * 86400
_PART_BYTES = 8 * MIB
_KEYS_PER_MIB = 8000  # keys of cached parts in a MiB of nginx's memory
_MIN_KEYS_MIB = 16
# nginx needs 0.9 KiB for each.
_KIB_PER_OWNER = 2
_MIN_OWNERS_KIB = 256
_SPECIAL = re.compile(r"[$\"'\\\x00-\x1f]")  # characters that nginx would not take literally
# A parameter of AWS's signatures, which is left out of the names of parts.
_SIGNATURE = (
    r"X-Amz-(Algorithm|Content-Sha256|Credential|Date|Expires|Security-Token|Sign\w+)=[\w%/+=.~-]*"
)
# Whose permission to read an object counts for whom: that of any node; that for the same url, which
# proves the secret key; and, while the store cannot be asked, that of the same access key.
_SAME_RIGHTS = "$http_host$object"
_OWN_RIGHTS = "$http_host$request_uri|$http_authorization|$http_cookie"
_OWN_KEY = "$access_key|$http_authorization|$http_cookie|$http_host$object"
_LINE = re.compile(r"( *)(?:\[(\w+)\] )?(.*)")  # of the template: indent, name of its rows, text

Rows = list[Mapping[str, object]]


def time_limits(stall_timeout_s: float) -> dict[str, int]:
    """Return nginx's limits of time in milliseconds.

    All of them follow from two facts: `store_ms` says how long the object store may be silent, and
    `lease_ms` when a worker that does not show itself is gone, with the parts that it fetches.
    Raises ConfigError if the limits contradict each other.

    Args:
        stall_timeout_s: the daemon's option of that name.
    """
    question_ms = 1000 * QUESTION * stall_timeout_s
    store_ms = round(1000 * stall_timeout_s)
    connect_ms = round(0.8 * question_ms)
    front_ms = round(_MAX_STALLS * 1000 * stall_timeout_s)
    is_possible = (
        0 < connect_ms < question_ms and 2 * question_ms < store_ms < front_ms < 1000 * _MAX_S
    )
    if not is_possible:
        raise ConfigError(
            "the tier cannot derive its time limits from a stall time-out of "
            f"{stall_timeout_s:g} s",
            remedy="use the daemons' value, such as 20",
        )
    return {
        # To connect to an owner, TLS handshakes included: an owner whose processors are busy is not
        # lost, and whoever took over from it would fetch the part a second time.
        "connect_ms": connect_ms,
        # To find another owner.
        "tries_ms": 3 * connect_ms,
        # For an owner to answer whether it has a request in hand, which the daemon asks as long as
        # no bytes come.
        "answer_ms": connect_ms,
        # For the object store to send the next bytes.
        "store_ms": store_ms,
        # For an owner to answer whether a node may have an object: it may have to ask the store.
        "asked_ms": 2 * store_ms,
        "lease_ms": connect_ms,
        # For the next bytes from an owner, which sends none while it waits: it only ends what the
        # daemon has not ended.
        "front_ms": front_ms,
    }


class _Line(Template):
    delimiter = "@"  # nginx's own variables begin with $


def render(tier: Tier, node: Node) -> str:
    """Return the nginx.conf of a node. Raises ConfigError."""
    values = _values(tier, node)
    rows = _rows(tier, node)
    rows["lua"] = _parts_in_hand(values)
    lines: list[str] = []
    for source in _template():
        lines.extend(_expanded(source, values, rows))
    return "".join(f"{line}\n" for line in lines)


def _parts_in_hand(values: Mapping[str, object]) -> Rows:
    """Return the lines of the Lua program by which nginx's workers know each other's parts."""
    source = files("shardcache.cluster").joinpath("parts_in_hand.lua").read_text()
    return [{"line": _Line(line).substitute(values)} for line in source.splitlines()]


@cache
def _template() -> list[str]:
    template = files("shardcache.cluster").joinpath("nginx.conf.template")
    return template.read_text().splitlines()


def _expanded(source: str, values: Mapping[str, object], rows: Mapping[str, Rows]) -> Iterator[str]:
    """Yield the lines that a line of the template stands for."""
    found = _LINE.fullmatch(source)
    assert found is not None
    indent, name, text = found.groups()
    for row in rows[name] if name else [{}]:
        yield indent + _Line(text).substitute(values, **row)


def _values(tier: Tier, node: Node) -> dict[str, object]:
    own = node.at(tier.owner_port)
    listening = node if tier.listen is None else Node(node.name, tier.listen)
    owner = listening.at(tier.owner_port)
    scheme = "http"
    if tier.tls is not None:
        owner += " ssl"
        scheme = "https"
    parts = tier.max_size_bytes / _PART_BYTES
    keys_mib = math.ceil(2 * parts / _KEYS_PER_MIB)
    return {
        "workers": tier.workers,
        "signature": _SIGNATURE,
        "cache": _path(tier.cache(node)),
        "run": _path(tier.run(node)),
        "keys_mib": max(_MIN_KEYS_MIB, keys_mib),
        "max_size": f"{max(1, tier.max_size_bytes // MIB)}m",
        "min_free": f"{max(1, tier.min_free_bytes // MIB)}m",
        "permitted_s": max(tier.trust_s, 1),
        "leases_mib": _LEASES_MIB,
        "owners_kib": _MIN_OWNERS_KIB + len(tier.nodes) * _KIB_PER_OWNER,
        "weight": tier.weight,
        "may": _SAME_RIGHTS if tier.same_rights else _OWN_RIGHTS,
        "grant": _SAME_RIGHTS if tier.same_rights else _OWN_KEY,
        "front": _socket_path(tier.front(node)),
        "own": own,
        "owner": owner,
        "scheme": scheme,
        "peers": json.dumps({"node": node.name, "peers": len(tier.nodes), "digest": tier.digest}),
        **time_limits(tier.stall_timeout_s),
    }


def _rows(tier: Tier, node: Node) -> dict[str, Rows]:
    """Return the values of each row of the template's repeated and optional lines."""
    rows: dict[str, Rows] = {
        "user": [],
        "resolved": [],
        "outage": [],
        "trusted": [],
        "https": [],
        "tls": [],
        "noting": [],
        "named": [],
        "nodes": [{"server": each.at(tier.owner_port)} for each in tier.nodes],
        "names": [{"name": name} for name in _names(tier)],
    }
    if tier.user:
        rows["user"] = [{"user": tier.user}]
    if tier.resolvers:
        servers = list(tier.resolvers)
        if not tier.ipv6:
            servers.append("ipv6=off")
        rows["resolved"] = [{"resolvers": " ".join(servers)}]
    if tier.outage_s:
        rows["outage"] = [{"outage_s": tier.outage_s}]
    if tier.trust_s:
        copied_s = tier.trust_s // _COPIED_SHARE
        rows["trusted"] = [{"copied_s": copied_s, "kept_s": tier.trust_s - copied_s}]
    if any(store.scheme == "https" for store in tier.stores):
        rows["https"] = [{"store_ca": _path(tier.store_ca)}]
    return rows | _store_rows(tier) | _tls_rows(tier, node)


def _store_rows(tier: Tier) -> dict[str, Rows]:
    """Return the rows of the stores.

    nginx knows the addresses of some when it starts: these have a group of servers.
    """
    stores: Rows = []
    addresses: Rows = []
    for number, store in enumerate(tier.stores):
        group = "$http_host"
        if store.is_address or not tier.resolvers:
            group = f"store-{number}"
            addresses.append({"group": group, "server": store.server})
        stores.append(
            {
                "pattern": _host_pattern(store),
                "url": f"{store.scheme}://{group}",
                "host": store.host,
            },
        )
    return {"stores": stores, "addresses": addresses}


def _tls_rows(tier: Tier, node: Node) -> dict[str, Rows]:
    tls = tier.tls_of(node)
    if tls is None:
        return {}
    secured: Rows = [
        {
            "certificate": _path(tls.certificate),
            "key": _path(tls.key),
            "ca": _path(tls.ca),
            "owner_name": PEER_NAME if tls.is_shared else "$owner_name",
        },
    ]
    return {
        "tls": secured,
        "noting": secured if tier.outage_s else [],
        "named": [{"server": each.at(tier.owner_port), "name": each.name} for each in tier.nodes],
    }


def _names(tier: Tier) -> Iterable[str]:
    """Return the names of certificates that the tier admits."""
    if tier.tls is None:
        return ()
    names = (tier.tls.name_of(node)[:MAX_COMMON_NAME] for node in tier.nodes)
    return dict.fromkeys(names)


def _host_pattern(store: Upstream) -> str:
    """Return nginx's pattern of a store's host, and of the buckets' hosts below it."""
    host = re.escape(store.authority).replace("\\-", "-")
    below = "" if store.is_address else "([a-z0-9_-]+[.])*"
    return f"~*^{below}{host}$"


def _socket_path(path: Path) -> str:
    """Return the path of a Unix socket as text. Raises ConfigError if nginx cannot use it."""
    text = _path(path)
    if len(os.fsencode(text)) > MAX_SOCKET_BYTES or ":" in text:
        raise ConfigError(
            f"a Unix socket's path may have at most {MAX_SOCKET_BYTES} bytes and, for "
            "nginx, no colon",
            url=text,
            remedy="choose another --run-dir",
        )
    return text


def _path(path: Path) -> str:
    """Return a path as text. Raises ConfigError if nginx cannot use it."""
    text = str(path)
    if _SPECIAL.search(text):
        raise ConfigError(
            "nginx cannot use a path with $, quotes or line breaks",
            url=text,
            remedy="choose another",
        )
    return text
