"""Guard of requests over TCP, which are read-only.

If the daemon has a token, each request over TCP must carry it, and may then read everything. If the
daemon has no token, requests over TCP read only what every user may see. Readers' sessions, which
are WebSockets, are not served over TCP.
"""

import os
import socket

from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.server.api import Handler
from shardcache.server.dashboard import BROWSER_HEADERS, LIVE_PATH, STATIC_PATH
from shardcache.server.listening.tcp_token import carries_token
from shardcache.server.peer import PEER, socket_of
from shardcache.shared.exceptions import NotAllowedError

TOKEN_HASH: web.AppKey[bytes | None] = web.AppKey("TOKEN_HASH")
"""Hash of the token that requests over TCP must carry; None without a token file."""

_READABLE = frozenset({"/v1/health", "/v1/status", "/v1/shards", "/metrics", LIVE_PATH})
_NOBODY = Peer(2**32 - 1)  # no user can have this id (chown(2))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Pass all requests from the Unix socket, and permitted requests over TCP; refuse others."""
    if _is_local(request):
        return await handler(request)

    token_hash = request.app[TOKEN_HASH]
    refusal = _refusal(request, token_hash)
    if refusal is not None:
        return refusal

    if token_hash is None:
        # Any user who can log in to the node may have sent the request.
        request[PEER] = _NOBODY
    else:
        # The token grants the rights of the daemon's own user.
        request[PEER] = Peer(os.getuid())
    return await handler(request)


async def harden(request: web.Request, response: web.StreamResponse) -> None:
    """Add browser security headers to a TCP response, and close the connection after it.

    aiohttp calls this before it sends a response.
    """
    if _is_local(request):
        return
    headers = BROWSER_HEADERS | {"Cache-Control": "no-store"}
    for name, text in headers.items():
        # The dashboard's files already have their own Cache-Control, which stays.
        response.headers.setdefault(name, text)
    # Each connection serves one request, because an idle connection counts towards the maximum
    # number of connections (`TCP_LIMITS`), too.
    response.force_close()


def _is_local(request: web.Request) -> bool:
    """Return whether a request came over a Unix socket."""
    return socket_of(request).family == socket.AF_UNIX


def _refusal(request: web.Request, token_hash: bytes | None) -> web.Response | None:
    """Return the response that refuses a request over TCP; None if the request is permitted."""
    # The dashboard's static files hold no data, and a browser loads them without a token.
    is_page = request.path == "/" or request.path.startswith(STATIC_PATH)
    if token_hash is None and not _is_loopback_name(request.host):
        return _error_response(403, f"{request.host!a} is not a loopback name of this node")
    if token_hash is not None and not is_page and not carries_token(request, token_hash):
        challenge = {"WWW-Authenticate": "Bearer"}
        return _error_response(401, "requests over TCP need the token", challenge)
    if request.method not in ("GET", "HEAD"):
        return _error_response(405, "requests over TCP are read-only", {"Allow": "GET, HEAD"})
    is_readable = is_page or request.path in _READABLE
    begins_session = "Upgrade" in request.headers  # asks for a WebSocket
    if begins_session or not is_readable:
        return _error_response(403, "not available over TCP")
    return None


def _error_response(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """Return the response that refuses a request, with the JSON of a NotAllowedError."""
    error = NotAllowedError(message, remedy="use the daemon's Unix socket")
    return web.json_response({"error": error.to_json()}, status=status, headers=headers)


def _is_loopback_name(host: str) -> bool:
    """Return True if a Host header, with or without a port, names the loopback.

    Any other name may be that of a web site which makes it resolve to the loopback (DNS rebinding),
    so that its pages can send requests to the daemon.
    """
    name = host
    has_port = ":" in host and not host.endswith("]")
    if has_port:
        name, _, _ = host.rpartition(":")
    return name.lower() in ("localhost", "127.0.0.1", "[::1]")
