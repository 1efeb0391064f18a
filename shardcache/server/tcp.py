"""The daemon's status over TCP, for dashboards and scrapers: read-only, on the loopback or with a bearer token."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from shardcache.access.peer import PEER, socket_of
from shardcache.access.rules import Peer
from shardcache.errors import ConfigError, DaemonError, NotAllowedError
from shardcache.server.connection_limit import Acceptor, Limits

_MIN_CHARS = 16
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


class Token:
    """A secret, kept only as its hash."""

    def __init__(self, text: str) -> None:
        self._hash = _hash(text)

    def __repr__(self) -> str:
        return "<Token>"

    @classmethod
    def read(cls, path: Path) -> Token:
        """Read the token from a file, without surrounding white space.

        Raises ConfigError if the file cannot be read, others may read or write it, or the token is too short.
        """
        try:
            mode, text = path.stat().st_mode, path.read_text().strip()
        except (OSError, UnicodeDecodeError) as exn:
            raise ConfigError(f"cannot read the token file: {exn}", remedy="correct --http-token-file") from None
        if mode & _OTHERS:
            raise ConfigError(f"{path} may be read or written by others", remedy=f"chmod 600 {path}")
        if len(text) < _MIN_CHARS or not text.isascii() or not text.isprintable():
            raise ConfigError(
                f"{path} does not hold a token of at least {_MIN_CHARS} printable ASCII characters",
                remedy=f"openssl rand -hex 32 > {path}",
            )
        return cls(text)

    def is_in(self, request: web.Request) -> bool:
        """Return True if a request carries the token: `Authorization: Bearer …` (RFC 6750, 2.1)."""
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        # Hashes have one length: the comparison's time reveals nothing.
        return hmac.compare_digest(_hash(text.strip()), self._hash) and scheme.lower() == "bearer"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


_READABLE = frozenset(
    {"/v1/health", "/v1/status", "/v1/shards", "/metrics", "/dashboard/live"},
)
_CONNECTIONS = 64
_LIMITS = Limits(_CONNECTIONS, _CONNECTIONS, limit_s=60.0)
_NOBODY = Peer(2**32 - 1)  # the one id that no user has (chown(2))
# Any page on the web may send a browser to an address on this node.
BROWSER_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Listener:
    """Bound sockets of one `--http HOST:PORT`.

    Attributes:
        sockets: one for each address of the host.
        token: the token that requests must carry; None on the loopback without a token file.
    """

    sockets: tuple[socket.socket, ...]
    token: Token | None


LISTENER: web.AppKey[Listener] = web.AppKey("LISTENER", Listener)


@contextmanager
def listening(
    http: str | None, token_file: Path | None, handed: tuple[socket.socket, ...] = ()
) -> Iterator[Listener | None]:
    """Bind the address given by `--http`, or use the activated sockets; None without either.

    Raises ConfigError for both together, for an invalid address or token file, and for an address beyond the loopback
    without a token; DaemonError if the address cannot be bound.
    """
    if http is None and not handed:
        yield None
        return
    if http is not None and handed:
        raise ConfigError("--http conflicts with the activated TCP socket", remedy="omit --http")
    token = None if token_file is None else Token.read(token_file)
    addresses = _addresses(http) if http is not None else [sock.getsockname()[:2] for sock in handed]
    if token is None and not all(ipaddress.ip_address(address).is_loopback for address, _ in addresses):
        raise ConfigError(
            f"{http or addresses} can be reached from other machines, but there is no token",
            remedy="set --http-token-file, or listen on 127.0.0.1",
        )
    with contextlib.ExitStack() as bound:
        sockets = handed if http is None else (_bind(http, address) for address in addresses)
        yield Listener(tuple(bound.enter_context(sock) for sock in sockets), token)


@contextmanager
def serving_tcp(runner: web.AppRunner, listener: Listener | None) -> Iterator[None]:
    """Serve a runner's application on the listener's sockets too, where `guard` protects it."""
    if listener is None:
        yield
        return
    assert runner.server is not None  # the runner is set up
    acceptor = Acceptor(runner.server, lambda: _LIMITS)
    with contextlib.ExitStack() as accepting:
        for sock in listener.sockets:
            accepting.enter_context(acceptor.accepting(sock))
        yield


@web.middleware
async def guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Pass requests from the Unix socket; over TCP, only those that read what is public there."""
    if _is_local(request):
        return await handler(request)
    refusal = _refusal(request, request.app[LISTENER].token)
    if refusal is not None:
        return refusal
    # With the token, a client has the daemon's own rights; without one, it is any user who can log in to the node.
    request[PEER] = _NOBODY if request.app[LISTENER].token is None else Peer(os.getuid())
    return await handler(request)


async def harden(request: web.Request, response: web.StreamResponse) -> None:
    """Add browser security headers to a TCP response; for `Application.on_response_prepare`."""
    if not _is_local(request):
        for name, text in (BROWSER_HEADERS | {"Cache-Control": "no-store"}).items():
            response.headers.setdefault(name, text)  # the dashboard's files have a Cache-Control of their own
        response.force_close()


def is_page(path: str) -> bool:
    """Return True for the dashboard's static files: they hold no data, and a browser loads them without a token."""
    return path == "/" or path.startswith("/dashboard/static/")


def _is_local(request: web.Request) -> bool:
    return socket_of(request).family == socket.AF_UNIX


def _refusal(request: web.Request, token: Token | None) -> web.Response | None:
    if token is None and not _is_loopback_name(request.host):
        return _refused(403, f"{request.host!a} is not a loopback name of this node")
    page = is_page(request.path)
    if token is not None and not page and not token.is_in(request):
        return _refused(401, "requests over TCP need the token", {"WWW-Authenticate": "Bearer"})
    if request.method not in ("GET", "HEAD"):
        return _refused(405, "requests over TCP are read-only", {"Allow": "GET, HEAD"})
    if not (page or request.path in _READABLE) or "Upgrade" in request.headers:
        return _refused(403, "not available over TCP")
    return None


def _refused(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    error = NotAllowedError(message, remedy="use the daemon's Unix socket; see docs/security.md")
    return web.json_response({"error": error.to_json()}, status=status, headers=headers)


def _is_loopback_name(host: str) -> bool:
    """Return True for a loopback name: a page loaded by any other may belong to a DNS rebinding site."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.lower() in ("localhost", "127.0.0.1", "[::1]")


def _addresses(http: str) -> list[tuple[str, int]]:
    host, colon, port = http.rpartition(":")
    try:
        if not colon or not port.isdecimal():
            raise ValueError("no port")
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (ValueError, OverflowError, OSError) as exn:
        raise ConfigError(f"--http {http} is not an address: {exn}", remedy="write HOST:PORT") from None
    return list(dict.fromkeys((str(address[0]), int(address[1])) for *_, address in found))


def _bind(http: str, address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=_CONNECTIONS)
    except OSError as exn:
        raise DaemonError(f"cannot listen at {http}: {exn.strerror or exn}", remedy="choose another --http") from exn
    sock.setblocking(False)
    return sock
