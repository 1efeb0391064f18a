"""The admin API: JSON over HTTP on the daemon's socket, for the command line and for `curl --unix-socket`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from shardcache import __version__
from shardcache.access.peer import peer_of
from shardcache.access.rules import Peer
from shardcache.errors import (
    AccessDeniedError,
    CacheError,
    ConfigError,
    ExhaustedError,
    NotAllowedError,
    NotFoundError,
    ProtocolError,
    ShardcacheError,
)
from shardcache.protocol import parse, take
from shardcache.server.drain import DRAIN
from shardcache.server.load import LoopLag, process_stats
from shardcache.server.session import CACHE
from shardcache.tarindex import TokenMember

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# A long-running request: takes the urls, the peer and a callback for events.
Errand = Callable[[list[str], Peer, Callable[[Json], Awaitable[None]]], Awaitable[None]]

_STATUS: dict[type[ShardcacheError], int] = {
    NotFoundError: 404,
    AccessDeniedError: 403,
    NotAllowedError: 403,
    ConfigError: 400,
    ProtocolError: 400,
    ExhaustedError: 503,
    CacheError: 507,
}

_BODY_S = 10.0

routes = web.RouteTableDef()
STARTED_AT_S = web.AppKey("STARTED_AT_S", float)
LOOP_LAG = web.AppKey("LOOP_LAG", LoopLag)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn a ShardcacheError or an HTTP error into its JSON, with the best matching HTTP status."""
    try:
        return await handler(request)
    except ShardcacheError as exn:
        status = next((code for kind, code in _STATUS.items() if isinstance(exn, kind)), 502)
        return _failure(exn, status)
    except web.HTTPClientError as exn:  # no such path, no such method, too large a body
        answer = _failure(ProtocolError(f"{request.method} {request.path}: {exn.reason}"), exn.status)
        if "Allow" in exn.headers:
            answer.headers["Allow"] = exn.headers["Allow"]
        return answer
    except ConnectionError:
        return web.Response()  # the client disconnected midway and receives no response
    except OSError as exn:  # the process's own: it has run out of descriptors, say
        return _failure(ExhaustedError(f"the daemon cannot answer ({exn.strerror or exn})"), 503)


def _failure(exn: ShardcacheError, status: int) -> web.Response:
    return web.json_response({"error": exn.to_json()}, status=status)


@routes.get("/v1/health")
async def health(request: web.Request) -> web.Response:
    """Report the daemon's health: `ok`, `degraded` while its disk is unhealthy, `draining` while it stops.

    The HTTP status is always 200: a liveness probe must not kill a daemon that still serves cached shards.
    """
    found = request.app[CACHE].health()
    return web.json_response(found | {"status": "draining"} if request.app[DRAIN].began else found)


@routes.get("/v1/status")
async def status(request: web.Request) -> web.Response:
    """Return the version, process figures, cache, counters, transfers and jobs."""
    uptime_s = time.monotonic() - request.app[STARTED_AT_S]
    head: Json = {"version": __version__, "uptime_s": round(uptime_s, 3), "pid": os.getpid()}
    head["draining"] = request.app[DRAIN].began
    own = {"process": process_stats(), "loop_lag": request.app[LOOP_LAG].to_json()}
    return web.json_response(head | own | request.app[CACHE].status(peer_of(request)))


@routes.get("/v1/shards")
async def shards(request: web.Request) -> web.StreamResponse:
    """Stream the cached shards whose url starts with `prefix`, one per line."""
    return await _stream(request, request.app[CACHE].shards(request.query.get("prefix", ""), peer_of(request)))


@routes.post("/v1/warm")
async def warm(request: web.Request) -> web.StreamResponse:
    """Fetch the shards that `urls` name; stream events, one per line."""
    return await _tell(request, request.app[CACHE].warm)


@routes.post("/v1/index")
async def index(request: web.Request) -> web.StreamResponse:
    """Count the samples of the shards that `urls` name, and the tokens in the member `tokens`; stream events."""
    body = await _body(request)
    member = TokenMember.parse(take(body, "tokens", str)) if "tokens" in body else None
    return await _tell(request, partial(request.app[CACHE].index, member=member))


@routes.post("/v1/evict")
async def evict(request: web.Request) -> web.Response:
    """Evict the cached shards that `urls` match."""
    urls = take(await _body(request), "urls", list[str])
    return web.json_response(await request.app[CACHE].evict(urls, peer_of(request)))


@routes.get("/v1/pins")
async def pins(request: web.Request) -> web.StreamResponse:
    """Stream the pinned shards, one per line."""
    return await _stream(request, request.app[CACHE].pins(peer_of(request)))


@routes.post("/v1/pin")
async def pin(request: web.Request) -> web.StreamResponse:
    """Pin and fetch the shards that `urls` name; stream events, one per line."""
    return await _tell(request, request.app[CACHE].pin)


@routes.post("/v1/unpin")
async def unpin(request: web.Request) -> web.Response:
    """Unpin the shards that `urls` match."""
    urls = take(await _body(request), "urls", list[str])
    return web.json_response(await request.app[CACHE].unpin(urls, peer_of(request)))


@routes.post("/v1/verify")
async def verify(request: web.Request) -> web.StreamResponse:
    """Verify the cached shards whose url starts with `prefix`; stream events, one per line."""
    prefix = take(await _body(request), "prefix", str)
    return await _stream(request, request.app[CACHE].verify(prefix, peer_of(request)))


class _Lines:
    """A response of JSON lines. It starts with the first line, so that an earlier error still gets its HTTP status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})

    async def write(self, event: Json) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(json.dumps(event, ensure_ascii=False).encode() + b"\n")


async def _tell(request: web.Request, errand: Errand) -> web.StreamResponse:
    urls = take(await _body(request), "urls", list[str])
    lines = _Lines(request)
    try:
        await _run(errand(urls, peer_of(request), lines.write), lines)
    except* ConnectionError:
        pass  # the client disconnected: running transfers finish, no others are started
    return lines.response


async def _run(errand: Awaitable[None], lines: _Lines) -> None:
    """Await a request's end; an error after its first line is its last line."""
    try:
        await errand
    except ShardcacheError as exn:
        if not lines.response.prepared:
            raise
        await lines.write({"event": "failed", "error": exn.to_json()})


async def _stream(request: web.Request, events: AsyncIterator[Json]) -> web.StreamResponse:
    lines = _Lines(request)

    async def write() -> None:
        async for event in events:
            await lines.write(event)

    with suppress(ConnectionError):  # the client disconnected
        await _run(write(), lines)
        await lines.response.prepare(request)  # if there was no line
    return lines.response


async def _body(request: web.Request) -> Json:
    try:
        async with asyncio.timeout(_BODY_S):
            return parse(await request.read())
    except TimeoutError:  # a connection that its client holds for nothing
        raise ProtocolError(f"the request's body did not arrive within {_BODY_S:g} s") from None
