"""The daemon's HTTP server: all of it on the Unix socket; status for dashboards and scrapers over TCP, read-only."""

import asyncio
import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from shardcache.access import Peer
from shardcache.cache.facade import Cache
from shardcache.errors import ConfigError, DaemonError, NotAllowedError
from shardcache.protocol import SESSION_PATH
from shardcache.server import api
from shardcache.server.connections import Acceptor, Limits
from shardcache.server.lifecycle import Drain
from shardcache.server.service import PEER, SERVICE, Service, peer_of, socket_of
from shardcache.server.session import handle_session

# Grace period of connections that are still open after the drain.
_CLOSE_S = 0.5
_MIN_TOKEN_CHARS = 16
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP
_READABLE = frozenset({"/v1/health", "/v1/status", "/v1/shards", "/metrics", api.LIVE_PATH})
_TCP_CONNECTIONS = 64
_TCP_LIMITS = Limits(_TCP_CONNECTIONS, _TCP_CONNECTIONS, limit_s=60.0)
_NOBODY = Peer(2**32 - 1)  # the one id that no user has (chown(2))


async def _metrics(request: web.Request) -> web.Response:
    from shardcache.server.metrics import metrics  # 25 ms, which a daemon that nobody scrapes need not spend

    return await metrics(request)


def _token_hash(path: Path) -> bytes:
    """Return the hash of the token in a file, without surrounding white space.

    Raises ConfigError if the file cannot be read, others may read or write it, or the token is too short.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exn:
        raise ConfigError(f"cannot read the token file: {exn}", remedy="correct --http-token-file") from None
    if mode & _OTHERS:
        raise ConfigError(f"{path} may be read or written by others", remedy=f"chmod 600 {path}")
    if len(text) < _MIN_TOKEN_CHARS or not text.isascii() or not text.isprintable():
        raise ConfigError(
            f"{path} does not hold a token of at least {_MIN_TOKEN_CHARS} printable ASCII characters",
            remedy=f"openssl rand -hex 32 > {path}",
        )
    return _hash(text)


def _carries(request: web.Request, token_hash: bytes) -> bool:
    """Return True if a request carries the token: `Authorization: Bearer …` (RFC 6750, 2.1)."""
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    # Hashes have one length: the comparison's time reveals nothing.
    return hmac.compare_digest(_hash(text.strip()), token_hash) and scheme.lower() == "bearer"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Listener:
    """Bound sockets of one `--http HOST:PORT`, one for each address of the host."""

    sockets: tuple[socket.socket, ...] = ()
    token_hash: bytes | None = None  # of the token that requests must carry; None without a token file


@contextmanager
def listening(http: str | None, token_file: Path | None, handed: tuple[socket.socket, ...] = ()) -> Iterator[Listener]:
    """Bind the address given by `--http`, or use the activated sockets, if there are any.

    Raises ConfigError for both together, for an invalid address or token file, and for an address beyond the loopback
    without a token; DaemonError if the address cannot be bound.
    """
    if http is None and not handed:
        yield Listener()
        return
    if http is not None and handed:
        raise ConfigError("--http conflicts with the activated TCP socket", remedy="omit --http")
    token_hash = None if token_file is None else _token_hash(token_file)
    addresses = _addresses(http) if http is not None else [sock.getsockname()[:2] for sock in handed]
    if token_hash is None and not all(ipaddress.ip_address(address).is_loopback for address, _ in addresses):
        raise ConfigError(
            f"{http or addresses} can be reached from other machines, but there is no token",
            remedy="set --http-token-file, or listen on 127.0.0.1",
        )
    with ExitStack() as bound:
        sockets = handed if http is None else (_bind(http, address) for address in addresses)
        yield Listener(tuple(bound.enter_context(sock) for sock in sockets), token_hash)


def _addresses(http: str) -> list[tuple[str, int]]:
    host, colon, port = http.rpartition(":")
    try:
        if not colon or not port.isdecimal():
            raise ValueError("no port")
        name = host.strip("[]") or None
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (ValueError, OverflowError, OSError) as exn:
        raise ConfigError(f"--http {http} is not an address: {exn}", remedy="write HOST:PORT") from None
    return list(dict.fromkeys((str(address[0]), int(address[1])) for *_, address in found))


def _bind(http: str, address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=_TCP_CONNECTIONS)
    except OSError as exn:
        raise DaemonError(f"cannot listen at {http}: {exn.strerror or exn}", remedy="choose another --http") from exn
    sock.setblocking(False)
    return sock


# The application

TOKEN_HASH: web.AppKey[bytes | None] = web.AppKey("TOKEN_HASH")


@asynccontextmanager
async def serving(
    cache: Cache, sock: socket.socket, limits: Callable[[], Limits], listener: Listener
) -> AsyncIterator[Drain]:
    """Serve on a listening socket, and over TCP by the listener, until the block exits.

    `limits` returns those of the socket. Yields the Drain, which lets requests in progress finish; after that, the
    socket still answers health and status.
    """
    app = _application(Service(cache, limits), listener.token_hash)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    assert runner.server is not None
    over_tcp = Acceptor(runner.server, lambda: _TCP_LIMITS)
    try:
        with ExitStack() as accepting:
            accepting.enter_context(Acceptor(runner.server, limits).accepting(sock))
            for tcp_sock in listener.sockets:
                accepting.enter_context(over_tcp.accepting(tcp_sock))
            yield app[SERVICE].drain
    finally:
        await runner.cleanup()
        app[SERVICE].writer.shutdown(wait=False)


def _application(service: Service, token_hash: bytes | None) -> web.Application:
    app = web.Application(middlewares=[api.errors_as_json, _guard, _admit])
    app[SERVICE] = service
    app[TOKEN_HASH] = token_hash
    app.on_response_prepare.append(_harden)
    app.add_routes(api.routes)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get(SESSION_PATH, handle_session)
    api.add_dashboard(app)
    app.cleanup_ctx.append(_measuring)
    return app


async def _measuring(app: web.Application) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(app[SERVICE].loop_lag.run(), name="loop lag")
        yield
        task.cancel()


@web.middleware
async def _admit(request: web.Request, handler: api.Handler) -> web.StreamResponse:
    """Log requests that change something; refuse them and sessions, which log themselves, while the daemon stops."""
    service = request.app[SERVICE]
    if request.method != "GET":
        service.audit.note("request", peer_of(request).uid, what=request.path.rpartition("/")[2])
    elif "Upgrade" not in request.headers:
        return await handler(request)
    with service.drain.errand():
        return await handler(request)


@web.middleware
async def _guard(request: web.Request, handler: api.Handler) -> web.StreamResponse:
    """Pass requests from the Unix socket; over TCP, only those that read what is public there."""
    if _is_local(request):
        return await handler(request)
    token_hash = request.app[TOKEN_HASH]
    if (refusal := _refusal(request, token_hash)) is not None:
        return refusal
    # With the token, a client has the daemon's own rights; without one, it is any user who can log in to the node.
    request[PEER] = _NOBODY if token_hash is None else Peer(os.getuid())
    return await handler(request)


async def _harden(request: web.Request, response: web.StreamResponse) -> None:
    """Add browser security headers to a TCP response."""
    if not _is_local(request):
        for name, text in (api.BROWSER_HEADERS | {"Cache-Control": "no-store"}).items():
            response.headers.setdefault(name, text)  # the dashboard's files have a Cache-Control of their own
        response.force_close()


def _is_local(request: web.Request) -> bool:
    return socket_of(request).family == socket.AF_UNIX


def _refusal(request: web.Request, token_hash: bytes | None) -> web.Response | None:
    # The dashboard's static files hold no data, and a browser loads them without a token.
    is_page = request.path == "/" or request.path.startswith(api.STATIC_PATH)
    if token_hash is None and not _is_loopback_name(request.host):
        return _refused(403, f"{request.host!a} is not a loopback name of this node")
    if token_hash is not None and not is_page and not _carries(request, token_hash):
        return _refused(401, "requests over TCP need the token", {"WWW-Authenticate": "Bearer"})
    if request.method not in ("GET", "HEAD"):
        return _refused(405, "requests over TCP are read-only", {"Allow": "GET, HEAD"})
    if not (is_page or request.path in _READABLE) or "Upgrade" in request.headers:
        return _refused(403, "not available over TCP")
    return None


def _refused(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    error = NotAllowedError(message, remedy="use the daemon's Unix socket")
    return web.json_response({"error": error.to_json()}, status=status, headers=headers)


def _is_loopback_name(host: str) -> bool:
    """Return True for a loopback name: a page loaded by any other may belong to a DNS rebinding site."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.lower() in ("localhost", "127.0.0.1", "[::1]")
