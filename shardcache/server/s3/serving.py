"""The S3 endpoint's server, and the keys that users get at the Unix socket.

`app` starts it if the daemon has an endpoint. A key is an id and a secret with which an S3 client
signs its requests.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial

from aiohttp import web

from shardcache.cache.facade import Cache
from shardcache.server.listening.acceptor import Acceptor
from shardcache.server.listening.limits import Limits
from shardcache.server.listening.s3_listener import S3Options
from shardcache.server.peer import peer_of
from shardcache.server.process.drain import Drain
from shardcache.server.s3.error_documents import S3Error
from shardcache.server.s3.s3_endpoint import S3Endpoint
from shardcache.server.s3.sending import Sender
from shardcache.server.s3.user_keys import S3Keys
from shardcache.shared.exceptions import ExhaustedError
from shardcache.store.disk.mounts import mount_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_CONNECTIONS = 4096
# The limit of open files allows one connection for each 8 files: a request opens further files, and
# so does the rest of the daemon.
_FILES_PER_CONNECTION = 8
_FIRST_REQUEST_S = 10.0  # time within which a connection's first request has to arrive
_KEEPALIVE_S = 75.0
_CLOSE_S = 0.5  # time that connections have at shutdown to finish their requests


@asynccontextmanager
async def serving_s3(
    cache: Cache,
    drain: Drain,
    options: S3Options,
) -> AsyncIterator[Handler]:
    """Serve S3 clients during the block.

    Yields the handler of requests for keys, which users send to the Unix socket.
    """
    layout = cache.layout
    replacement = layout.replacement_of(layout.s3_keys)
    keys = S3Keys(layout.s3_keys, replacement, options.key_life_s)
    await asyncio.to_thread(keys.restore)
    mount = await asyncio.to_thread(mount_of, layout.shards)
    sender = Sender(options.stall_s, is_memory=mount.is_memory)
    endpoint = S3Endpoint(cache, keys, drain, sender)
    server = web.Server(
        endpoint.handle,
        # When a client disconnects, its request no longer waits for cache space or bytes.
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEPALIVE_S,
        auto_decompress=False,
    )
    acceptor = Acceptor(server, partial(_current_limits, options.stall_s), _refusal)
    try:
        with ExitStack() as accepting:
            for sock in options.sockets:
                accepting.enter_context(acceptor.accepting(sock))
            yield partial(_give_key, keys)
    finally:
        await server.shutdown(_CLOSE_S)
        sender.close()


async def _give_key(keys: S3Keys, request: web.Request) -> web.Response:
    """Answer with a key for the user who sent the request, in the form of `credential_process`.

    AWS SDKs run a program of this name from their configuration, and parse the JSON that it prints.
    """
    key = await keys.give(peer_of(request))
    expires = datetime.fromtimestamp(key.expires_s, UTC)
    return web.json_response(
        {
            "Version": 1,
            "AccessKeyId": key.access_key,
            "SecretAccessKey": key.secret_key,
            "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
        headers={"Cache-Control": "no-store"},
    )


def _current_limits(stall_s: float) -> Limits:
    """Return the limits of connections, which depend on the process' present limit of open files.

    Args:
        stall_s: maximum time for which a client may read nothing.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = min(_MAX_CONNECTIONS, files // _FILES_PER_CONNECTION)
    return Limits(
        connections,
        per_user=connections,
        first_request_s=_FIRST_REQUEST_S,
        stall_s=stall_s,
    )


def _refusal(error: ExhaustedError) -> bytes:
    """Return the answer to a connection beyond the limits, which makes clients try again."""
    body = S3Error("SlowDown", error.message).document("/", "0")
    head = (
        "HTTP/1.1 503 Slow Down",
        "Content-Type: application/xml",
        f"Content-Length: {len(body)}",
        "Retry-After: 1",
        "Connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
