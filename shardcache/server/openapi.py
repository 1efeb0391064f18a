"""The admin API as an OpenAPI 3.1 document, which the daemon serves at /v1/openapi.json.

Answers may gain fields: what stands here is the least that each holds. A request's unknown fields are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from shardcache import __version__
from shardcache.cache.probing import MAX_URLS

Json = dict[str, Any]

JSON = "application/json"
NDJSON = "application/x-ndjson"

# Every operation may meet these: what http itself refuses, and, where it is asked by TCP, what is not for all.
_ALWAYS = {
    400: "The request makes no sense.",
    401: "By TCP: the token is missing or another.",
    403: "This is not for who asks, or not to be had by TCP.",
    405: "The path knows other methods, which `Allow` names.",
    413: "The body is larger than a mebibyte.",
}
_STOPPING = {503: "The daemon is stopping and takes on nothing more."}
_OF_URLS = {
    403: "The daemon may not fetch this for who asks, or the store refuses its credentials.",
    404: "There is nothing that the urls name.",
    502: "The store does not give what was asked.",
    507: "The cache or its disk has no room for it.",
}
_OF_DISK = {507: "The cache or its disk does not allow it."}


@cache
def document() -> Json:
    """Return the document. The same object each time: not to be changed."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "shardcache",
            "version": __version__,
            "description": "What tools ask of a node's daemon, over its Unix socket, or, what only reads, by TCP. "
            "Sizes are in bytes, times in seconds. Training processes speak another protocol, over a WebSocket at "
            "/v1/session.",
        },
        "servers": [{"url": "/"}],
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }


def _paths() -> Json:
    return {
        "/v1/openapi.json": {"get": _operation("This document.", JSON, {"type": "object"})},
        "/v1/health": {"get": _operation("Whether the daemon serves.", JSON, _ref("Health"))},
        "/v1/status": {"get": _operation("What the cache holds and does now.", JSON, _ref("Status"))},
        "/v1/shards": {
            "get": _operation("The cached shards whose url begins with a prefix.", NDJSON, _lines("Shard"))
            | {"parameters": [{"name": "prefix", "in": "query", "schema": {"type": "string"}}]}
        },
        "/v1/warm": {"post": _of_urls("Fetch what the urls name.", NDJSON, _lines("Event"), _OF_URLS)},
        "/v1/index": {"post": _of_urls("Count the samples of what the urls name.", NDJSON, _lines("Event"), _OF_URLS)},
        "/v1/pin": {"post": _of_urls("Fetch what the urls name, and have it stay.", NDJSON, _lines("Event"), _OF_URLS)},
        "/v1/unpin": {"post": _of_urls("Let what the urls match go again.", JSON, _ref("Unpinned"), _OF_DISK)},
        "/v1/pins": {"get": _operation("What is pinned.", NDJSON, _lines("Pin"))},
        "/v1/settings": {
            "get": _operation("What can be set while the daemon runs.", JSON, _object({"settings": _list(_SETTING)})),
            "post": _operation("Set one of these until the daemon ends.", JSON, _SETTING, _STOPPING | _OF_DISK)
            | {"requestBody": {"required": True, "content": {JSON: {"schema": _change()}}}},
        },
        "/v1/evict": {
            "post": _of_urls("Remove what the urls match, unless it is in use or pinned.", JSON, _ref("Evicted"))
        },
        "/v1/probe": {
            "post": _operation("Try the stores of some urls, or all known ones.", NDJSON, _lines("Finding"), _STOPPING)
            | _body({"urls": {**_URLS, "maxItems": MAX_URLS}, "quick": {"type": "boolean"}})
        },
        "/v1/verify": {
            "post": _operation("Read the shards below a prefix again.", NDJSON, _lines("Event"), _STOPPING)
            | _body({"prefix": {"type": "string"}})
        },
    }


def _operation(summary: str, media: str, schema: Json, errors: dict[int, str] | None = None) -> Json:
    answers: Json = {"200": {"description": summary, "content": {media: {"schema": schema}}}}
    for status, why in sorted((_ALWAYS | (errors or {})).items()):
        answers[str(status)] = {"description": why, "content": {JSON: {"schema": _ref("Failure")}}}
    return {"summary": summary, "responses": answers}


def _of_urls(summary: str, media: str, schema: Json, errors: dict[int, str] | None = None) -> Json:
    return _operation(summary, media, schema, _STOPPING | (errors or {})) | _body({"urls": _URLS})


def _body(properties: Json) -> Json:
    schema = _object(properties)
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _lines(name: str) -> Json:
    """Describe a stream of JSON values, one a line, as the list that they make."""
    return {"type": "array", "items": _ref(name), "description": "one a line, as it happens"}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Json, optional: Iterable[str] = ()) -> Json:
    required = [name for name in properties if name not in set(optional)]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_URLS: Json = {
    "type": "array",
    "items": {"type": "string", "format": "shard-pattern"},
    "description": "urls, brace patterns, globs, prefixes that end in a slash, index files",
}
_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL: Json = {"type": ["integer", "null"], "minimum": 0}
_NUMBER: Json = {"type": "number"}
_NUMBER_OR_NULL: Json = {"type": ["number", "null"]}
_COUNTS: Json = {"type": "object", "additionalProperties": _COUNT}


_SETTING: Json = _object({"name": _TEXT, "value": {"type": ["string", "integer", "null"]}, "description": _TEXT})


def _change() -> Json:
    """Describe a change: each setting's value is written as its flag takes it."""
    formats = {"capacity": "amount", "max_bandwidth": "rate", "log_level": "log-level"}
    return {
        "oneOf": [
            _object({"name": {"const": name}, "value": {"type": "string", "format": form}})
            for name, form in formats.items()
        ]
    }


def _schemas() -> Json:
    error = {"code": _TEXT, "message": _TEXT, "url": _TEXT_OR_NULL, "remedy": _TEXT, "parents": _list(_TEXT)}
    shard = {"url": _TEXT, "version": _TEXT, "size_bytes": _COUNT, "samples": _COUNT, "leases": _COUNT}
    disk = {"state": _TEXT, "error": {"anyOf": [_ref("Error"), {"type": "null"}]}, "since_s": _NUMBER}
    disk |= {"short_bytes": _COUNT, "silent_s": _NUMBER}
    kept = _object({"url": _TEXT, "reason": _TEXT})
    return {
        "Failure": _object({"error": _ref("Error")}),
        "Error": _object(error),
        "Health": _object({"status": {"enum": ["ok", "degraded", "draining"]}, "disk": _ref("Disk")}),
        "Disk": _object(disk),
        "Status": _status(),
        "Shard": _object(shard | {"pinned": {"type": "boolean"}, "used_at_s": _NUMBER}),
        "Pin": _object({"url": _TEXT, "size_bytes": _COUNT, "here": {"type": "boolean"}, "uids": _list(_COUNT)}),
        "Unpinned": _object({"unpinned": _list(_TEXT), "kept": _list(kept)}),
        "Evicted": _object({"evicted": _list(_TEXT), "kept": _list(kept), "freed_bytes": _COUNT}),
        "Event": _event(),
        "Finding": _object(
            {"check": _TEXT, "state": {"enum": ["ok", "warning", "failed", "skipped"]}}
            | dict.fromkeys(("found", "cause", "remedy", "subject"), _TEXT)
            | {"figures": {"type": "object", "additionalProperties": _NUMBER}}
        ),
    }


def _status() -> Json:
    cache = {"dir": _TEXT, "free_bytes": _COUNT_OR_NULL}  # null where the folder is gone
    cache |= dict.fromkeys(("capacity_bytes", "used_bytes", "pinned_bytes", "arriving_bytes", "shards"), _COUNT)
    scrub = dict.fromkeys(("rate_bytes_per_s", "scrubbed_bytes", "scrubbed_shards", "damaged"), _COUNT)
    scrub |= {"round_share": _NUMBER, "round_begun_at_s": _NUMBER_OR_NULL, "last_round_ended_at_s": _NUMBER_OR_NULL}
    store = {"name": _TEXT, "connections": _COUNT, "limit": _COUNT, "busy": _COUNT}
    transfer = {"url": _TEXT, "done_bytes": _COUNT, "total_bytes": _COUNT_OR_NULL, "rate_bytes_per_s": _COUNT}
    transfer |= {"class": _TEXT, "stage": _TEXT, "waiters": _COUNT, "needed_in_s": _NUMBER_OR_NULL}
    job = {"name": _TEXT, "uid": _COUNT, "sessions": _COUNT, "shards_planned": _COUNT, "shards_done": _COUNT}
    job |= {"stall_s": _NUMBER, "waited": {"type": "object", "additionalProperties": _NUMBER}}
    job |= {"shards_per_s": _NUMBER, "ahead_s": _NUMBER_OR_NULL, "waiting": _COUNT, "waiting_for": _TEXT_OR_NULL}
    return _object(
        {
            "version": _TEXT,
            "uptime_s": _NUMBER,
            "pid": _COUNT,
            "draining": {"type": "boolean"},
            "process": _COUNTS,
            "loop_lag": {"type": "object", "additionalProperties": _NUMBER},
            "disk": _ref("Disk"),
            "scrub": _object(scrub),
            "pins": _object(dict.fromkeys(("shards", "missing", "size_bytes", "limit_bytes"), _COUNT)),
            "cache": _object(cache),
            "counters": _COUNTS,
            "origins": _list(_object(store)),
            "transfers": _list(_object(transfer)),
            "jobs": _list(_object(job)),
        }
    )


def _event() -> Json:
    """Describe what `warm`, `pin`, `index` and `verify` tell; the kind says which of the fields are there."""
    counts = ("shards", "done_shards", "samples", "number", "fetched", "cached", "known", "failed", "corrupt")
    sizes = ("bytes", "done_bytes", "size_bytes", "origin_bytes")
    fields = {
        "event": {"enum": ["resolved", "start", "progress", "shard", "error", "done"]},
        "url": _TEXT,
        "state": _TEXT,
        "ok": {"type": "boolean"},
        "error": _ref("Error"),
        "version": _TEXT,
        "total_bytes": _COUNT_OR_NULL,
    } | dict.fromkeys(counts + sizes, _COUNT)
    return _object(fields, optional=fields.keys() - {"event"})
