"""The admin API: JSON over HTTP, for the command line and for `curl --unix-socket`.

`app` serves these routes at the Unix socket. A handler calls a method of the `Cache` with the user
who sent the request (`peer_of`). A request that may take long is answered with a stream of events,
one JSON object per line.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from aiohttp import web

from shardcache.server.peer import peer_of
from shardcache.server.process.process_load import process_stats
from shardcache.server.service import SERVICE
from shardcache.shared import exceptions
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.protocol import Json, parse, take, wanted_of
from shardcache.shared.tarindex.named_members import TokenMember

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Send = Callable[[Json], Awaitable[None]]
"""Function that sends one event of a stream."""

# HTTP statuses by class of error; the first row that fits is used. All other errors come from the
# origin.
_STATUS_OF_ERROR: dict[type[ShardcacheError], int] = {
    exceptions.NotFoundError: 404,
    exceptions.AccessDeniedError: 403,
    exceptions.NotAllowedError: 403,
    exceptions.ConfigError: 400,
    exceptions.ProtocolError: 400,
    exceptions.StoppingError: 503,
    exceptions.ExhaustedError: 503,
    exceptions.CacheError: 507,
}
_STATUS_OF_ORIGIN_ERRORS = 502
# Time within which the body of a request has to arrive. A slower client would occupy a connection.
_BODY_S = 10.0

log = structlog.get_logger()

routes = web.RouteTableDef()


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn an error that a handler raises into a JSON response with a fitting HTTP status."""
    try:
        return await handler(request)
    except ShardcacheError as exn:
        return _error_response(exn, _status_of(exn))
    except web.HTTPClientError as exn:  # no such path, no such method, too large a body
        error = exceptions.ProtocolError(f"{request.method} {request.path}: {exn.reason}")
        response = _error_response(error, exn.status)
        if "Allow" in exn.headers:
            response.headers["Allow"] = exn.headers["Allow"]
        return response
    except ConnectionError:
        return web.Response()  # the client disconnected midway and receives no response
    except OSError as exn:  # an error of this process, such as too many open files
        exhausted = exceptions.ExhaustedError(f"the daemon cannot answer ({exn.strerror or exn})")
        return _error_response(exhausted, 503)
    except web.HTTPException:  # an answer of aiohttp's own, such as a redirect
        raise
    except Exception as exn:  # a top-level guard, as in sessions: the client gets the error
        # Once a response has begun, the connection can only be closed.
        if request.writer.output_size:
            raise
        log.exception("unexpected error in a request", path=request.path)
        return _error_response(exceptions.internal_error(exn), 500)


def _status_of(exn: ShardcacheError) -> int:
    """Return the HTTP status for an error."""
    for error_class, http_status in _STATUS_OF_ERROR.items():
        if isinstance(exn, error_class):
            return http_status
    return _STATUS_OF_ORIGIN_ERRORS


def _error_response(exn: ShardcacheError, status: int) -> web.Response:
    """Return a response with an error's JSON and an HTTP status."""
    return web.json_response({"error": exn.to_json()}, status=status)


@routes.get("/v1/health")
async def health(request: web.Request) -> web.Response:
    """Report `ok`, `degraded` if the disk is unhealthy, or `draining` if the daemon is stopping.

    The HTTP status is always 200: a liveness probe must not kill a daemon that still serves cached
    shards.
    """
    service = request.app[SERVICE]
    report = service.cache.health()
    if service.drain.has_begun:
        report["status"] = "draining"
    return web.json_response(report)


@routes.get("/v1/status")
async def status(request: web.Request) -> web.Response:
    """Return the status page: version, process, cache, counters, transfers and jobs."""
    page = request.app[SERVICE].status(peer_of(request))
    return web.json_response(page | {"process": process_stats()})


@routes.get("/v1/shards")
async def shards(request: web.Request) -> web.StreamResponse:
    """Stream the cached shards whose url starts with `prefix`, one per line."""
    prefix = request.query.get("prefix", "")
    cached = request.app[SERVICE].cache.shards(prefix, peer_of(request))
    return await _stream_all(request, cached)


@routes.get("/v1/pins")
async def pins(request: web.Request) -> web.StreamResponse:
    """Stream the pinned shards, one per line."""
    pinned = request.app[SERVICE].cache.pins(peer_of(request))
    return await _stream_all(request, pinned)


@routes.post("/v1/verify")
async def verify(request: web.Request) -> web.StreamResponse:
    """Verify the cached shards whose url starts with `prefix`; stream events, one per line."""
    body = await _receive_body(request)
    prefix = take(body, "prefix", str)
    events = request.app[SERVICE].cache.verify(prefix, peer_of(request))
    return await _stream_all(request, events)


@routes.post("/v1/index")
async def index(request: web.Request) -> web.StreamResponse:
    """Count the samples of the shards that the body's `urls` name; stream events, one per line.

    If the body has `tokens`, it names a member of the samples, whose tokens are counted as well.
    """
    body = await _receive_body(request)
    urls = take(body, "urls", list[str])
    member = None
    if "tokens" in body:
        member = TokenMember.parse(take(body, "tokens", str))
    cache = request.app[SERVICE].cache
    peer = peer_of(request)
    return await _stream(request, lambda send: cache.index(urls, peer, send, member))


@routes.post("/v1/warm")
async def warm(request: web.Request) -> web.StreamResponse:
    """Fetch the objects that the body's `urls` name; stream events, one per line.

    The field `wanted` states whether they are shards or files.
    """
    body = await _receive_body(request)
    urls = take(body, "urls", list[str])
    wanted = wanted_of({"wanted": "shards"} | body)  # without the field, they are shards
    cache = request.app[SERVICE].cache
    peer = peer_of(request)
    return await _stream(request, lambda send: cache.warm(urls, peer, send, wanted))


@routes.post("/v1/pin")
async def pin(request: web.Request) -> web.StreamResponse:
    """Pin the shards that the body's `urls` name; stream events, one per line."""
    urls = await _receive_urls(request)
    cache = request.app[SERVICE].cache
    peer = peer_of(request)
    return await _stream(request, lambda send: cache.pin(urls, peer, send))


@routes.post("/v1/unpin")
async def unpin(request: web.Request) -> web.Response:
    """Unpin the shards that the body's `urls` name."""
    urls = await _receive_urls(request)
    unpinned = await request.app[SERVICE].cache.unpin(urls, peer_of(request))
    return web.json_response(unpinned)


@routes.post("/v1/evict")
async def evict(request: web.Request) -> web.Response:
    """Evict the shards that the body's `urls` name."""
    urls = await _receive_urls(request)
    evicted = await request.app[SERVICE].cache.evict(urls, peer_of(request))
    return web.json_response(evicted)


async def no_endpoint(request: web.Request) -> web.StreamResponse:
    """Refuse a request for a key: the handler of daemons without an S3 endpoint."""
    raise exceptions.ConfigError(
        "the daemon has no S3 endpoint",
        remedy="start it with --s3 127.0.0.1:9099",
    )


async def _stream_all(request: web.Request, events: AsyncIterator[Json]) -> web.StreamResponse:
    """Stream the events of an iterator; see `_stream`."""

    async def run(send: Send) -> None:
        async for event in events:
            await send(event)

    return await _stream(request, run)


async def _stream(
    request: web.Request,
    run: Callable[[Send], Awaitable[None]],
) -> web.StreamResponse:
    """Stream events as JSON lines.

    The response starts with the first event, so that an error before it gets its HTTP status. A
    later error is the last line of the response.

    Args:
        run: creates the events, and passes each to the function with which it is called.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})

    async def send(event: Json) -> None:
        if not response.prepared:
            await response.prepare(request)
        line = json.dumps(event, ensure_ascii=False)
        await response.write(line.encode() + b"\n")

    try:
        try:
            await run(send)
        except ShardcacheError as exn:
            if not response.prepared:
                raise
            await send({"event": "failed", "error": exn.to_json()})
    except* ConnectionError:  # several tasks may have been sending, so there may be a group
        pass  # the client disconnected: running transfers finish, and no others start
    return response


async def _receive_urls(request: web.Request) -> list[str]:
    """Receive the request's body; return its `urls`. Raises ProtocolError."""
    body = await _receive_body(request)
    return take(body, "urls", list[str])


async def _receive_body(request: web.Request) -> Json:
    """Receive the request's body, a JSON object; keep the credentials in it for the user.

    Raises ProtocolError.
    """
    try:
        async with asyncio.timeout(_BODY_S):
            body = parse(await request.read())
    except TimeoutError:
        raise exceptions.ProtocolError(
            f"the request's body did not arrive within {_BODY_S:g} s",
        ) from None
    credentials = body.get("credentials")
    if isinstance(credentials, dict):
        cache = request.app[SERVICE].cache
        cache.session_credentials.hand_over(credentials, peer_of(request).uid)
    return body
