"""The nginx.conf of one node, for `shardcache cluster render` and `shardcache cluster run`.

The file is made from the template nginx.conf.template in this folder. In the template:

- `@name` stands for a value of `_values`, and `@@` for `@`.
- A line that begins with `[if name]` is left out unless the feature of that name is in use. It may
  also use the feature's values, which are in `_features`.
- A line that begins with `[each name]` is repeated for each row of the table of that name. It may
  also use the row's values, which are in `_tables`.

Terms:

- part: a range of an object;
- owner: the node that fetches and caches a part;
- front: the Unix socket at which nginx serves the daemon of its own node;
- permission: the object store's answer that a signed url may be read; nginx caches it for a time;
- lease: the note of an nginx worker that it is fetching a part, renewed while the worker runs;
- stall time-out: the time after which the daemon gives up a download from which nothing arrives.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TypeAlias

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier_config import MAX_COMMON_NAME, MIB, PEER_NAME, Tier, Upstream
from shardcache.origin.tier.tier_state import QUESTION_STALL_SHARE
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.unix_socket import MAX_SOCKET_BYTES

_LEASES_MIB = 16  # memory for some 50,000 parts that are being fetched at the same time
# One node asks the object store for a permission. An owner that copies it may use the copy for a
# tenth of the time for which the permission is good, and the node that asked uses it for the rest.
_COPIED_DIVISOR = 10
_MAX_STALLS = 180  # number of stall time-outs for which an owner may send nothing
# After `QUESTION_STALL_SHARE` times the stall time-out, the daemon asks an owner that sends nothing
# whether it still serves the request. nginx may take this share of that time to connect to an
# owner, so that it finds a dead owner before the daemon asks.
_CONNECT_SHARE = 0.8
_MAX_FRONT_S = 30 * 86400  # a longer limit comes from a mistyped stall time-out
_PART_BYTES = 8 * MIB  # usual size of a part
# nginx keeps the keys of cached parts in memory, some 8000 keys per MiB. It gets memory for twice
# the number of parts of the usual size.
_KEYS_PER_MIB = 8000
_KEYS_RESERVE = 2
_MIN_KEYS_MIB = 16
_KIB_PER_OWNER = 2  # memory per node in nginx's list of owners; nginx needs 0.9 KiB
_MIN_OWNERS_KIB = 256
_SPECIAL = re.compile(r"[$\"'\\\x00-\x1f]")  # characters that nginx would not take literally
# A parameter of AWS's signatures. It differs between requests for the same part, so it is left out
# of the part's name.
_SIGNATURE = (
    r"X-Amz-(Algorithm|Content-Sha256|Credential|Date|Expires|Security-Token|Sign\w+)=[\w%/+=.~-]*"
)
# Keys of permissions in nginx's cache. A request with the same key needs no new permission.
# 1. With --same-rights, the permission of any node counts for all nodes: the key names the object.
_SAME_RIGHTS = "$http_host$object"
# 2. Otherwise, a permission counts for the same url and credentials only. The url's signature
#    proves that the client has the secret key.
_OWN_RIGHTS = "$http_host$request_uri|$http_authorization|$http_cookie"
# 3. While the object store cannot be asked, a permission counts for the object and access key.
_OWN_KEY = "$access_key|$http_authorization|$http_cookie|$http_host$object"
# A line of the template: indent, "if" or "each" with the name of a feature or table, and text.
_TEMPLATE_LINE = re.compile(r"( *)(?:\[(if|each) (\w+)\] )?(.*)")

Values: TypeAlias = Mapping[str, object]
"""Values by their names in the template."""


def time_limits(stall_timeout_s: float) -> dict[str, int]:
    """Return nginx's time limits in milliseconds, by their names in the template.

    Args:
        stall_timeout_s: the daemon's option of that name.

    Raises ConfigError if the limits contradict each other.
    """
    # The time of silence after which the daemon asks an owner whether it still serves the request.
    question_ms = 1000 * QUESTION_STALL_SHARE * stall_timeout_s
    store_ms = round(1000 * stall_timeout_s)
    connect_ms = round(_CONNECT_SHARE * question_ms)
    front_ms = round(_MAX_STALLS * 1000 * stall_timeout_s)
    # 1. nginx finds a dead owner before the daemon asks the owner.
    finds_dead_owner = 0 < connect_ms < question_ms
    # 2. The daemon asks, and waits as long again for the answer, before nginx gives up the store.
    hears_owner = 2 * question_ms < store_ms
    # 3. nginx waits longer for an owner than the owner waits for the store.
    waits_for_store = store_ms < front_ms < 1000 * _MAX_FRONT_S
    if not (finds_dead_owner and hears_owner and waits_for_store):
        raise ConfigError(
            "the tier cannot derive its time limits from a stall time-out of "
            f"{stall_timeout_s:g} s",
            remedy="use the daemons' value, such as 20",
        )
    return {
        # The limit for connecting to an owner, TLS handshakes included. The limit must not be so
        # short that a busy owner counts as lost, since another owner would fetch the part again.
        "connect_ms": connect_ms,
        # The limit for finding another owner.
        "tries_ms": 3 * connect_ms,
        # The limit for an owner's answer to the question whether it still serves a request, which
        # the daemon asks when no bytes arrive.
        "answer_ms": connect_ms,
        # The limit for the next bytes from the object store.
        "store_ms": store_ms,
        # The limit for an owner's answer whether a node may read an object. The owner may have to
        # ask the store.
        "asked_ms": 2 * store_ms,
        # The time without a renewal after which a lease ends: its worker counts as gone, and the
        # part as not being fetched.
        "lease_ms": connect_ms,
        # The limit for the next bytes from an owner, which sends nothing while it waits for the
        # store. The daemon ends a request long before this limit.
        "front_ms": front_ms,
    }


class _AtTemplate(Template):
    """A line of the template, in which `@name` stands for a value."""

    delimiter = "@"  # nginx's own variables begin with $


def render(tier: Tier, node: Node) -> str:
    """Return the nginx.conf of a node. Raises ConfigError."""
    values = _values(tier, node)
    features = _features(tier, node)
    tables = _tables(tier)
    tables["lua_line"] = _lua_lines(values)
    lines: list[str] = []
    for source in _template():
        match = _TEMPLATE_LINE.fullmatch(source)
        assert match is not None
        indent, kind, name, text = match.groups()
        template = _AtTemplate(text)
        rows = _rows(kind, name, features, tables)
        lines.extend(indent + template.substitute(values, **row) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _rows(
    kind: str | None,
    name: str,
    features: Mapping[str, Values | None],
    tables: Mapping[str, Sequence[Values]],
) -> Sequence[Values]:
    """Return a row of further values for each time that a line of the template is to appear.

    Args:
        kind: "if", "each", or None for a line that appears once in any case.
        name: name of the line's feature or table, if it has one.
        features: by the name of each feature, its values; None if the feature is not in use.
        tables: by the name of each table, its rows.
    """
    if kind == "each":
        return tables[name]
    if kind == "if":
        feature = features[name]
        return [] if feature is None else [feature]
    return [{}]


@cache
def _template() -> list[str]:
    """Return the lines of the template."""
    template = files("shardcache.cluster").joinpath("nginx.conf.template")
    return template.read_text().splitlines()


def _lua_lines(values: Values) -> list[Values]:
    """Return a row for each line of `parts_in_hand.lua`, which nginx.conf includes.

    This program manages the leases of nginx's workers.
    """
    source = files("shardcache.cluster").joinpath("parts_in_hand.lua").read_text()
    return [{"line": _AtTemplate(line).substitute(values)} for line in source.splitlines()]


def _values(tier: Tier, node: Node) -> dict[str, object]:
    """Return the values that any line of the template may use, by name."""
    own_address = node.at(tier.owner_port)
    listen = own_address
    if tier.listen is not None:
        listen = Node(node.name, tier.listen).at(tier.owner_port)
    scheme = "http"
    if tier.tls is not None:
        listen += " ssl"
        scheme = "https"
    part_count = tier.max_size_bytes / _PART_BYTES
    keys_mib = math.ceil(_KEYS_RESERVE * part_count / _KEYS_PER_MIB)
    about_peers = {"node": node.name, "peers": len(tier.nodes), "digest": tier.digest}
    return {
        "workers": tier.workers,
        # 1. Folders, and what nginx caches on disk and in memory
        "cache_dir": _path(tier.cache_folder(node)),
        "run_dir": _path(tier.run_folder(node)),
        "max_size": f"{max(1, tier.max_size_bytes // MIB)}m",
        "min_free": f"{max(1, tier.min_free_bytes // MIB)}m",
        "part_keys_mib": max(_MIN_KEYS_MIB, keys_mib),
        "permission_s": max(tier.trust_s, 1),
        "leases_mib": _LEASES_MIB,
        # 2. Names of parts, and of permissions
        "signature": _SIGNATURE,
        "permission_key": _SAME_RIGHTS if tier.same_rights else _OWN_RIGHTS,
        "outage_key": _SAME_RIGHTS if tier.same_rights else _OWN_KEY,
        # 3. The owners on the consistent-hash ring of parts, and this node among them
        "owners_kib": _MIN_OWNERS_KIB + len(tier.nodes) * _KIB_PER_OWNER,
        "weight": tier.weight,
        "peers": json.dumps(about_peers),  # nginx's answer to requests for `PEERS`
        "front_socket": _socket_path(tier.front(node)),  # for the node's own daemon
        "own_address": own_address,  # for the other nodes
        "owner_listen": listen,
        "owner_scheme": scheme,
        # 4. Time limits
        **time_limits(tier.stall_timeout_s),
    }


def _features(tier: Tier, node: Node) -> dict[str, Values | None]:
    """Return the values of the lines of each feature; None for a feature that is not in use."""
    features: dict[str, Values | None] = {
        "user": None,
        "resolvers": None,
        "outage": None,
        "trust": None,
        "https": None,
        "tls": _tls_values(tier, node),
        "outage_tls": None,
    }
    if tier.user:
        features["user"] = {"user": tier.user}
    if tier.resolvers:
        servers = list(tier.resolvers)
        if not tier.ipv6:
            servers.append("ipv6=off")
        features["resolvers"] = {"resolvers": " ".join(servers)}
    if tier.outage_s:
        features["outage"] = {"outage_s": tier.outage_s}
        features["outage_tls"] = features["tls"]  # lines that need both features
    if tier.trust_s:
        copied_s = tier.trust_s // _COPIED_DIVISOR
        features["trust"] = {"copied_s": copied_s, "kept_s": tier.trust_s - copied_s}
    if any(store.scheme == "https" for store in tier.stores):
        features["https"] = {"store_ca": _path(tier.store_ca)}
    return features


def _tls_values(tier: Tier, node: Node) -> Values | None:
    """Return the values of TLS between the nodes; None for plain HTTP."""
    tls = tier.tls_of(node)
    if tls is None:
        return None
    return {
        "certificate": _path(tls.certificate),
        "key": _path(tls.key),
        "ca": _path(tls.ca),
        "owner_name": PEER_NAME if tls.is_shared else "$owner_name",
    }


def _tables(tier: Tier) -> dict[str, list[Values]]:
    """Return the rows of each table, by the table's name.

    A store has a group (`upstream` in nginx.conf) if nginx knows its addresses from the start on:
    its url has an address, or no resolvers are configured, so that nginx looks the name up when it
    starts. The names of other stores are looked up during requests.
    """
    stores: list[Values] = []
    store_groups: list[Values] = []
    for number, store in enumerate(tier.stores):
        group = "$http_host"  # without a group, nginx connects to the host that the request names
        if store.is_address or not tier.resolvers:
            group = f"store-{number}"
            store_groups.append({"group": group, "server": store.server})
        url = f"{store.scheme}://{group}"
        stores.append({"pattern": _host_pattern(store), "url": url, "host": store.host})

    owners: list[Values] = []
    certified_owners: list[Values] = []
    for owner in tier.nodes:
        server = owner.at(tier.owner_port)
        owners.append({"server": server})
        if tier.tls is not None:
            certified_owners.append({"server": server, "name": owner.name})
    return {
        "store": stores,
        "store_group": store_groups,
        "owner": owners,
        "certified_owner": certified_owners,
        "certificate_name": [{"name": name} for name in _certificate_names(tier)],
    }


def _certificate_names(tier: Tier) -> list[str]:
    """Return the names of certificates that the tier admits, each once."""
    if tier.tls is None:
        return []
    names = [tier.tls.name_of(node)[:MAX_COMMON_NAME] for node in tier.nodes]
    return list(dict.fromkeys(names))


def _host_pattern(store: Upstream) -> str:
    """Return nginx's pattern of a store's host, and of the buckets' hosts below it."""
    host = re.escape(store.authority).replace("\\-", "-")  # a hyphen needs no escape
    buckets = "" if store.is_address else "([a-z0-9_-]+[.])*"
    return f"~*^{buckets}{host}$"


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
