"""A node's nginx.conf, composed of its blocks. Pure.

Two servers run in one nginx. The front serves the daemon of its node and passes each request on to the owner of the
shard. The owner serves the nodes: it caches parts, and asks the object store, with each caller's own signed url,
whether that caller may have them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier import MIB, PEER_NAME, Tier
from shardcache.cluster.upstreams import Upstream
from shardcache.errors import ConfigError

PEERS = "/.shardcache/peers"
STATUS = "/.shardcache/status"
OTHERS = "/.shardcache/nodes"
STATUS_FILE = "status.json"
ACCESS_LOG = "access.log"
PID_FILE = "nginx.pid"

# Headers by which an answer could change how nginx treats it: bytes of a version never change, whoever asks.
_IGNORED = (
    "Cache-Control Expires Vary Set-Cookie X-Accel-Buffering X-Accel-Charset X-Accel-Expires X-Accel-Limit-Rate "
    "X-Accel-Redirect"
)
# Of a cached file that was cut short, nginx sends what there is, and then waits for the next request: this bounds it.
_IDLE_S = 5
_PART_BYTES = 8 * MIB
_KEYS_PER_MIB = 8000
_LEAST_KEYS_MIB = 16
_SPECIAL = re.compile(r"[$\"'\\\x00-\x1f]")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")


def render(tier: Tier, node: Node) -> str:
    """Return the nginx.conf of a node."""
    return _joined(
        "# Written by `shardcache cluster render`; written again, it is the same on each node but for its own address.",
        *_process(tier, node),
        _block("events", "worker_connections 4096;"),
        _block(
            "http",
            *_logging(tier, node),
            *_connections(tier, node),
            *_caches(tier, node),
            *_requests(tier),
            *_upstreams(tier),
            _front(tier, node),
            _owner(tier, node),
        ),
    )


def _process(tier: Tier, node: Node) -> Iterable[str]:
    if tier.user is not None:
        yield f"user {tier.user};"
    yield f"worker_processes {tier.workers};"
    yield f"pid {_path(tier.run(node) / PID_FILE)};"
    yield "error_log stderr crit;"
    yield "daemon off;"
    yield "worker_shutdown_timeout 5s;"


def _logging(tier: Tier, node: Node) -> Iterable[str]:
    yield "# Signatures are in the arguments of urls: the access log omits them, and nginx's messages about requests,"
    yield "# which quote the whole url, are not logged."
    yield "error_log stderr emerg;"
    yield 'map $request_uri $path { default ""; "~^(?<raw_path>/[^?#|]*)([?]|$)" $raw_path; }'
    fields = {
        "time_s": "$msec",
        "port": "$server_port",
        "method": '"$request_method"',
        "host": '"$host"',
        "path": '"$path"',
        "range": '"$http_range"',
        "status": "$status",
        "sent_bytes": "$body_bytes_sent",
        "cache": '"$upstream_cache_status"',
        "upstream": '"$upstream_addr"',
        "upstream_status": '"$upstream_status"',
        "received_bytes": '"$upstream_response_length"',
        "duration_s": "$request_time",
    }
    line = ",".join(f'"{name}":{value}' for name, value in fields.items())
    yield f"log_format tier escape=json '{{{line}}}';"
    yield f"access_log {_path(tier.cache(node) / ACCESS_LOG)} tier;"


def _connections(tier: Tier, node: Node) -> Iterable[str]:
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        yield f"{kind}_temp_path {_path(tier.run(node) / kind)};"
    yield "default_type application/json;"
    yield "server_tokens off;"
    yield "sendfile on;"
    yield "tcp_nopush on;"
    yield "keepalive_timeout 75s;"
    yield "keepalive_requests 100000;"
    yield "client_max_body_size 1;"
    yield "large_client_header_buffers 8 32k;  # a signed url may hold a session's token"
    yield "proxy_http_version 1.1;"
    yield "proxy_buffer_size 16k;"
    yield "proxy_buffers 32 64k;"
    yield "proxy_busy_buffers_size 1m;"
    yield "proxy_socket_keepalive on;"
    if tier.resolvers:
        yield f"resolver {' '.join(tier.resolvers)};"
        yield "resolver_timeout 5s;"


def _caches(tier: Tier, node: Node) -> Iterable[str]:
    keys = max(_LEAST_KEYS_MIB, math.ceil(2 * tier.max_size_bytes / _PART_BYTES / _KEYS_PER_MIB))
    yield (
        f"proxy_cache_path {_path(tier.cache(node) / 'parts')} levels=1:2 keys_zone=parts:{keys}m "
        f"max_size={_mebibytes(tier.max_size_bytes)} min_free={_mebibytes(tier.min_free_bytes)} inactive=3650d "
        "use_temp_path=off loader_files=1000 manager_files=1000;"
    )
    yield "# In memory: the names of its entries contain signatures."
    yield (
        f"proxy_cache_path {_path(tier.run(node) / 'may')} levels=1 keys_zone=may:8m max_size=64m "
        f"inactive={max(tier.trust_s, 1)}s use_temp_path=off;"
    )


def _requests(tier: Tier) -> Iterable[str]:
    yield "# A part is a GET of one range of one version."
    conditions = (r"\"[^\"|]+\"\|", r"\|[A-Z][a-z][a-z], [0-9A-Za-z: ]+ GMT")
    yield _block(
        'map "$request_method $http_range|$http_if_match|$http_if_unmodified_since" $is_part',
        "default 0;",
        *(f'"~^GET bytes=[0-9]+-[0-9]+\\|{condition}$" 1;' for condition in conditions),
    )
    yield "# A signature does not change which object is meant; other arguments may, and two objects may share an ETag."
    yield _block("map $args $object", "default $request_uri;", '"~*(^|&)X-Amz-Signature=" $path;')
    yield "# Where a request may lead: to a store by its own name, or to a name below it, such as a bucket's."
    yield _block("map $http_host $store", 'default "";', *_mapped(tier, _store_url))
    yield _block("map $http_host $store_name", 'default "";', *_mapped(tier, lambda _tier, store: store.host))


def _mapped(tier: Tier, value: object) -> Iterable[str]:
    assert callable(value)
    for store in tier.stores:
        yield f'"{_host_pattern(store)}" {value(tier, store)};'


def _host_pattern(store: Upstream) -> str:
    host = re.escape(store.authority).replace("\\-", "-")
    below = "" if store.is_address else "([a-z0-9_-]+[.])*"
    return f"~*^{below}{host}$"


def _store_url(tier: Tier, store: Upstream) -> str:
    if store.is_address or not tier.resolvers:
        return f"{store.scheme}://{_group(tier, store)}"
    return f"{store.scheme}://$http_host"


def _group(tier: Tier, store: Upstream) -> str:
    return f"store-{tier.stores.index(store)}"


def _upstreams(tier: Tier) -> Iterable[str]:
    hashed = "$http_host$path" if tier.spread == "shard" else "$http_host$path$http_range"
    yield _block(
        "upstream owners",
        "zone owners 256k;",
        f"hash {hashed} consistent;",
        *(f"server {node.at(tier.owner_port)} max_fails=3 fail_timeout=10s;" for node in tier.nodes),
        "keepalive 64;",
        f"keepalive_timeout {_IDLE_S - 1}s;",
    )
    for number, node in enumerate(tier.nodes):
        yield _block(f"upstream node-{number}", f"server {node.at(tier.owner_port)};")
    for store in tier.stores:
        if store.is_address or not tier.resolvers:
            yield _block(f"upstream {_group(tier, store)}", f"server {store.server};", "keepalive 64;")


def _front(tier: Tier, node: Node) -> str:
    tls = tier.tls_of(node)
    scheme, client_tls = "http", tuple[str, ...]()
    if tls is not None:
        scheme, client_tls = "https", tuple(_client_tls(tls.ca, tls.certificate, tls.key))
    # The front's patience ends before the daemon's, so that it learns which owner is silent.
    patience_s = max(1, math.floor(0.9 * tier.stall_timeout_s))
    # TLS handshakes included. An owner whose processors are busy is not lost: whoever takes over from it would fetch
    # the part a second time.
    connect_s = max(1, patience_s // 4)
    return _block(
        "server",
        f"listen {tier.front};",
        *_internal(tier, node),
        _block(
            "location /",
            *_refusals(),
            f"proxy_pass {scheme}://owners;",
            "proxy_set_header Host $http_host;",
            'proxy_set_header Connection "";',
            *client_tls,
            f"proxy_connect_timeout {connect_s}s;",
            f"proxy_read_timeout {patience_s}s;",
            "proxy_send_timeout 5s;",
            "proxy_next_upstream error timeout;",
            "proxy_next_upstream_tries 3;",
            f"proxy_next_upstream_timeout {3 * connect_s}s;",
            "proxy_max_temp_file_size 0;",
        ),
        "# The other nodes, for `shardcache doctor`, which has no certificate.",
        _block(
            f'location ~ "^{OTHERS}/([0-9]+)/(peers|status)$"',
            "access_log off;",
            f"proxy_pass {scheme}://node-$1/.shardcache/$2;",
            *client_tls,
            "proxy_connect_timeout 1s;",
            "proxy_read_timeout 2s;",
        ),
    )


def _client_tls(ca: Path, certificate: Path, key: Path) -> Iterable[str]:
    yield f"proxy_ssl_certificate {_path(certificate)};"
    yield f"proxy_ssl_certificate_key {_path(key)};"
    yield f"proxy_ssl_trusted_certificate {_path(ca)};"
    yield "proxy_ssl_verify on;"
    yield f"proxy_ssl_name {PEER_NAME};"
    yield "proxy_ssl_server_name on;"
    yield "proxy_ssl_protocols TLSv1.3;"


def _owner(tier: Tier, node: Node) -> str:
    tls = tier.tls_of(node)
    address = node.at(tier.owner_port) if tier.listen is None else f"{_bracketed(tier.listen)}:{tier.owner_port}"
    return _block(
        "server",
        f"listen {address}{'' if tls is None else ' ssl'};",
        *(() if tls is None else _server_tls(tls.ca, tls.certificate, tls.key)),
        f"keepalive_timeout {_IDLE_S}s;",
        *_internal(tier, node),
        _block("location /", *_refusals(), *_cached_part(tier)),
        "# Does the store grant this caller this object? It is asked for one byte, once per signed url and node.",
        _block("location = /.shardcache/may", *_permission(tier)),
    )


def _server_tls(ca: Path, certificate: Path, key: Path) -> Iterable[str]:
    yield f"ssl_certificate {_path(certificate)};"
    yield f"ssl_certificate_key {_path(key)};"
    yield f"ssl_client_certificate {_path(ca)};"
    yield "ssl_verify_client on;"
    yield "ssl_protocols TLSv1.3;"
    yield "ssl_session_cache shared:nodes:4m;"


def _cached_part(tier: Tier) -> Iterable[str]:
    lock_s = math.ceil(3 * tier.stall_timeout_s)
    yield "auth_request /.shardcache/may;"
    yield "proxy_cache parts;"
    yield 'proxy_cache_key "$http_host$object|$http_if_match|$http_if_unmodified_since|$http_range";'
    yield "proxy_cache_valid 206 3650d;"
    yield "proxy_cache_bypass $http_x_shardcache_fresh;  # fetches and caches again: what is cached may be damaged"
    yield "proxy_cache_lock on;"
    yield f"proxy_cache_lock_timeout {lock_s}s;"
    yield f"proxy_cache_lock_age {lock_s}s;"
    yield from _to_store(tier)
    yield "proxy_pass $store$request_uri;"
    yield "proxy_set_header Range $http_range;"
    yield "proxy_set_header If-Match $http_if_match;"
    yield "proxy_set_header If-Unmodified-Since $http_if_unmodified_since;"
    yield 'add_header X-Shardcache-Tier "$upstream_cache_status" always;'


def _permission(tier: Tier) -> Iterable[str]:
    yield "internal;"
    yield "proxy_cache may;"
    yield 'proxy_cache_key "$http_host$request_uri|$http_authorization|$http_cookie";'
    if tier.trust_s:
        yield f"proxy_cache_valid 206 {tier.trust_s}s;"
    yield "proxy_cache_lock on;"
    yield f"proxy_cache_lock_timeout {math.ceil(tier.stall_timeout_s)}s;"
    yield from _to_store(tier)
    yield "proxy_pass $store$request_uri;"
    yield 'proxy_set_header Range "bytes=0-0";'


def _to_store(tier: Tier) -> Iterable[str]:
    """Yield the directives of a request to the store: of the caller's headers it has only what identifies them."""
    yield "proxy_pass_request_headers off;"
    yield "proxy_pass_request_body off;"
    yield "proxy_set_header Host $http_host;"
    yield 'proxy_set_header Connection "";'
    yield "proxy_set_header Accept-Encoding identity;"
    yield "proxy_set_header User-Agent $http_user_agent;"
    yield "proxy_set_header Authorization $http_authorization;"
    yield "proxy_set_header Cookie $http_cookie;"
    yield f"proxy_ignore_headers {_IGNORED};"
    yield "proxy_connect_timeout 5s;"
    yield f"proxy_read_timeout {math.ceil(tier.stall_timeout_s)}s;"
    yield "proxy_next_upstream error;"  # a connection that the store has closed meanwhile
    yield "proxy_next_upstream_tries 2;"
    if any(store.scheme == "https" for store in tier.stores):
        yield "proxy_ssl_server_name on;"
        yield "proxy_ssl_name $store_name;"
        yield "proxy_ssl_verify on;"
        yield "proxy_ssl_verify_depth 4;"
        yield "proxy_ssl_protocols TLSv1.2 TLSv1.3;"
        yield f"proxy_ssl_trusted_certificate {_path(tier.store_ca)};"


def _refusals() -> Iterable[str]:
    yield 'if ($store = "") { return 421; }'
    yield 'if ($path = "") { return 403; }'
    yield "if ($is_part = 0) { return 403; }"


def _internal(tier: Tier, node: Node) -> Iterable[str]:
    facts = json.dumps({"node": node.name, "peers": len(tier.nodes), "digest": tier.digest})
    body = f'{facts[:-1]}, "time_s": $msec}}'
    yield _block(f"location = {PEERS}", "access_log off;", f"return 200 '{body}';")
    yield _block(f"location = {STATUS}", "access_log off;", f"alias {_path(tier.run(node) / STATUS_FILE)};")


def _block(head: str, *lines: str) -> str:
    return f"{head} {{\n{indent(_joined(*lines), '    ')}}}"


def _joined(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _path(path: Path) -> str:
    text = str(path)
    if _SPECIAL.search(text):
        raise ConfigError("nginx cannot use a path with $, quotes or line breaks", url=text, remedy="choose another")
    return text if _PLAIN_PATH.fullmatch(text) else f'"{text}"'


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _mebibytes(value_bytes: int) -> str:
    return f"{max(1, value_bytes // MIB)}m"
