"""The admin API as an OpenAPI 3.1 document, for the fuzzer.

Answers may gain fields: the schemas list those that are always present. Unknown fields of a request are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from shardcache import __version__
from shardcache.tarindex.tokens import DTYPES

Json = dict[str, Any]

JSON = "application/json"
NDJSON = "application/x-ndjson"

# Errors of every operation: HTTP's own, and the restrictions on requests over TCP.
_ALWAYS = {
    400: "The request is invalid.",
    401: "Over TCP: the token is missing or wrong.",
    403: "The user may not do this, or it is not available over TCP.",
    405: "The method is not allowed; `Allow` lists those that are.",
    413: "The body is larger than 1 MiB.",
}
_STOPPING = {503: "The daemon is stopping and accepts no new work."}
_OF_URLS = {
    403: "The daemon may not fetch this for the user, or the origin refuses the daemon's credentials.",
    404: "The urls match nothing.",
    502: "The origin failed to deliver what was requested.",
    507: "There is not enough space in the cache or on its disk.",
}
_STREAMED = "streamed, one JSON value per line; if an error ends the stream, the last is an event `failed` with it"
_OF_DISK = {507: "The cache or its disk does not allow it."}


@cache
def document() -> Json:
    """Return the document: the same object each time, not to be modified."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "shardcache",
            "version": __version__,
            "description": "The admin API of a node's daemon, over its Unix socket; read-only operations also over "
            "TCP. Sizes are in bytes, times in seconds. Training processes speak another protocol, over a WebSocket "
            "at /v1/session.",
        },
        "servers": [{"url": "/"}],
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }


def _paths() -> Json:
    return {
        "/v1/health": {"get": _operation("The daemon's health.", JSON, _ref("Health"))},
        "/v1/status": {"get": _operation("The cache's contents, transfers, jobs and counters.", JSON, _ref("Status"))},
        "/v1/shards": {
            "get": _operation("The cached shards whose url starts with a prefix.", NDJSON, _lines("Shard"))
            | {"parameters": [{"name": "prefix", "in": "query", "schema": {"type": "string"}}]}
        },
        "/v1/warm": {"post": _of_urls("Fetch the named shards.", NDJSON, _lines("Event"), _OF_URLS)},
        "/v1/index": {
            "post": _operation("Count the samples of the named shards.", NDJSON, _lines("Event"), _STOPPING | _OF_URLS)
            | _body({"urls": _URLS, "tokens": _MEMBER}, optional=["tokens"])
        },
        "/v1/pin": {"post": _of_urls("Fetch and pin the named shards.", NDJSON, _lines("Event"), _OF_URLS)},
        "/v1/unpin": {"post": _of_urls("Unpin the matching shards.", JSON, _ref("Unpinned"), _OF_DISK)},
        "/v1/pins": {"get": _operation("The pinned shards.", NDJSON, _lines("Pin"))},
        "/v1/evict": {
            "post": _of_urls("Evict the matching shards, except leased and pinned ones.", JSON, _ref("Evicted"))
        },
        "/v1/verify": {
            "post": _operation("Verify the shards below a prefix.", NDJSON, _lines("Event"), _STOPPING)
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


def _body(properties: Json, optional: Iterable[str] = ()) -> Json:
    schema = _object(properties, optional)
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _lines(name: str) -> Json:
    """Describe a stream of JSON values, one per line, as an array."""
    return {"type": "array", "items": _ref(name), "description": _STREAMED}


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
    "description": "urls, brace patterns, globs, prefixes ending in a slash, index files",
}
_MEMBER: Json = {
    "type": "string",
    "pattern": f"^[^.:][^:]*(:({'|'.join(DTYPES)}))?$",
    "description": "member whose tokens to count, too: EXTENSION for .npy files, EXTENSION:DTYPE for plain arrays",
}
_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL: Json = {"type": ["integer", "null"], "minimum": 0}
_NUMBER: Json = {"type": "number"}
_NUMBER_OR_NULL: Json = {"type": ["number", "null"]}
_COUNTS: Json = {"type": "object", "additionalProperties": _COUNT}


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
        "Pin": _object({"url": _TEXT, "size_bytes": _COUNT, "cached": {"type": "boolean"}, "uids": _list(_COUNT)}),
        "Unpinned": _object({"unpinned": _list(_TEXT), "kept": _list(kept)}),
        "Evicted": _object({"evicted": _list(_TEXT), "kept": _list(kept), "freed_bytes": _COUNT}),
        "Event": _event(),
    }


def _status() -> Json:
    cache = {"dir": _TEXT, "free_bytes": _COUNT_OR_NULL}  # null if the folder is missing
    cache |= dict.fromkeys(("capacity_bytes", "used_bytes", "leased_bytes", "reserved_bytes", "shards"), _COUNT)
    scrub = dict.fromkeys(("rate_bytes_per_s", "scrubbed_bytes", "scrubbed_shards", "corrupt"), _COUNT)
    scrub |= {"round_share": _NUMBER, "round_begun_at_s": _NUMBER_OR_NULL, "last_round_ended_at_s": _NUMBER_OR_NULL}
    origin = {"name": _TEXT, "connections": _COUNT, "limit": _COUNT, "throttled": _COUNT}
    tier = {"address": _TEXT, "certificate_expires_s": _NUMBER_OR_NULL}
    tier |= {name: {"type": "boolean"} for name in ("failing", "stale")}
    transfer = {"url": _TEXT, "done_bytes": _COUNT, "total_bytes": _COUNT_OR_NULL, "rate_bytes_per_s": _COUNT}
    transfer |= {"class": _TEXT, "stage": _TEXT, "last_error": _TEXT_OR_NULL}
    transfer |= {"waiters": _COUNT, "needed_in_s": _NUMBER_OR_NULL}
    job = {
        "name": _TEXT,
        "uid": _COUNT,
        "user": _TEXT,
        "sessions": _COUNT,
        "shards_planned": _COUNT,
        "shards_done": _COUNT,
    }
    job |= {"waited_s": _NUMBER, "waited": {"type": "object", "additionalProperties": _NUMBER}}
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
            "origins": _list(_object(origin)),
            "tiers": _list(_object(tier)),
            "transfers": _list(_object(transfer)),
            "jobs": _list(_object(job)),
        }
    )


def _event() -> Json:
    """Describe the events of `warm`, `pin`, `index` and `verify`; `event` determines the fields present."""
    counts = ("shards", "done_shards", "samples", "tokens", "number", "fetched", "cached", "known", "failed", "corrupt")
    sizes = ("bytes", "done_bytes", "size_bytes", "origin_bytes")
    fields = {
        "event": {"enum": ["resolved", "start", "progress", "retrying", "shard", "error", "failed", "done"]},
        "message": _TEXT,
        "url": _TEXT,
        "state": _TEXT,
        "ok": {"type": "boolean"},
        "error": _ref("Error"),
        "version": _TEXT,
        "total_bytes": _COUNT_OR_NULL,
    } | dict.fromkeys(counts + sizes, _COUNT)
    return _object(fields, optional=fields.keys() - {"event"})
