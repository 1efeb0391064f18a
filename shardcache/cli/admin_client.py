"""The admin API over the daemon's Unix socket, as the commands use it."""

import json
import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import quote

from shardcache.errors import DaemonError, NoDaemonError, ProtocolError, from_json
from shardcache.private import tool_socket
from shardcache.protocol import Json
from shardcache.redact import printable
from shardcache.unix_socket import connected, credentials, health

# Close it, as with `contextlib.closing`: a caller that stops reading early frees the connection
# that way.
Lines = Generator[Json, None, None]

_CONNECT_LIMIT_S = 10.0


class AdminClient:
    """The admin API of one daemon; each request has a connection of its own.

    Every method raises NoDaemonError if nothing answers at the socket, DaemonError if this user may
    not use it, ProtocolError for an answer that no daemon gives, and any error that the daemon
    itself returns.

    Args:
        socket: path of the daemon's socket; None for the default one.
        silence_s: how long the daemon may be silent, even about its health. Work that lasts, such
            as warming a whole dataset, has no limit while the daemon is alive.
    """

    def __init__(self, socket: Path | None = None, silence_s: float = 10.0) -> None:
        self.socket = tool_socket(socket)
        self._chosen = socket is not None
        self._silence_s = silence_s

    def status(self) -> Json:
        """Return the daemon's status page."""
        return self._json("GET", "/v1/status")

    def evict(self, urls: Sequence[str]) -> Json:
        """Evict the shards that match; return those evicted, and those kept with the reason."""
        return self._json("POST", "/v1/evict", {"urls": urls})

    def unpin(self, urls: Sequence[str]) -> Json:
        """Unpin the shards that match; return those unpinned, and those kept with the reason."""
        return self._json("POST", "/v1/unpin", {"urls": urls})

    def pins(self) -> Lines:
        """Yield the pinned shards."""
        return self._lines("GET", "/v1/pins")

    def pin(self, urls: Sequence[str]) -> Lines:
        """Pin the shards of `urls`, and yield events until each is in the cache or has failed."""
        return self._until_done("/v1/pin", {"urls": urls})

    def shards(self, prefix: str) -> Lines:
        """Yield the cached shards whose url starts with `prefix`."""
        return self._lines("GET", f"/v1/shards?prefix={quote(prefix, safe='')}")

    def warm(self, urls: Sequence[str]) -> Lines:
        """Yield events until every shard of `urls` is in the cache or has failed."""
        return self._until_done("/v1/warm", {"urls": urls})

    def index(self, urls: Sequence[str], tokens: str | None = None) -> Lines:
        """Yield events until the samples of `urls`, and those of the member `tokens`, are counted
        in every shard.
        """
        return self._until_done(
            "/v1/index",
            {"urls": urls} | ({} if tokens is None else {"tokens": tokens}),
        )

    def verify(self, prefix: str) -> Lines:
        """Yield events until every cached shard below `prefix` has been verified."""
        return self._until_done("/v1/verify", {"prefix": prefix})

    def _json(self, method: str, path: str, body: Json | None = None) -> Json:
        with self._request(method, path, body) as response:
            answer: Json = shown(json.loads(response.read()))
            return answer

    def _lines(self, method: str, path: str, body: Json | None = None) -> Lines:
        # it may fetch something, which takes this process's own credentials
        if method == "POST" and not self._chosen:
            self.socket = tool_socket(fetches=True)
        with self._request(method, path, body) as response:
            for line in _lines_of(response):
                event = shown(json.loads(line))
                if event.get("event") == "failed":
                    raise from_json(event["error"])
                yield event

    def _until_done(self, path: str, body: Json) -> Lines:
        event: Json = {}
        with closing(self._lines("POST", path, body)) as events:
            for event in events:
                yield event
        if event.get("event") != "done":
            raise NoDaemonError(
                "the daemon stopped before the request was done",
                url=str(self.socket),
            )

    @contextmanager
    def _request(self, method: str, path: str, body: Json | None) -> Iterator[HTTPResponse]:
        """Yield the answer to a request.

        Turn the errors of its connection into errors that the user can act on.
        """
        where = str(self.socket)
        content = {} if body is None else {"Content-Type": "application/json"}
        with closing(HTTPConnection("shardcache")) as connection:
            try:
                connection.sock = self._connected()
                # a daemon that refuses a connection answers and closes without reading
                with suppress(BrokenPipeError):
                    connection.request(
                        method,
                        path,
                        None if body is None else json.dumps(body).encode(),
                        content,
                    )
                with connection.getresponse() as response:
                    if response.status >= 400:
                        raise error_of(response.status, response.reason, response.read())
                    yield response
            except TimeoutError as exn:
                raise NoDaemonError(
                    "the daemon accepts connections but does not answer within "
                    f"{self._silence_s:g} s",
                    url=where,
                    remedy=self._how_to_end_it(),
                ) from exn
            except (HTTPException, ConnectionError) as exn:
                reason = f"the connection to the daemon broke: {exn or type(exn).__name__}"
                raise NoDaemonError(reason, url=where) from exn
            except ValueError as exn:
                raise ProtocolError(f"the daemon's answer is not JSON: {exn}", url=where) from exn

    def _connected(self) -> socket:
        where = str(self.socket)
        try:
            sock = connected(self.socket, _CONNECT_LIMIT_S)
        except PermissionError as exn:
            remedy = f"join the group that owns it (ls -l {shlex.quote(where)}), then log in again"
            raise DaemonError(
                "you may not use the daemon's socket",
                url=where,
                remedy=remedy,
            ) from exn
        except BlockingIOError as exn:
            reason = "a daemon listens at the socket, but accepts no connections"
            raise NoDaemonError(reason, url=where, remedy=self._how_to_end_it()) from exn
        except OSError as exn:
            flag = f"--socket {shlex.quote(where)} " if self._chosen else ""
            command = f"shardcache serve {flag}--cache-dir /path/on/local/disk --capacity 500GB"
            raise NoDaemonError(
                "no daemon listens at the socket",
                url=where,
                remedy=f"start it: {command}",
            ) from exn
        return _WatchedConnection(sock, self.socket, self._silence_s)

    def _how_to_end_it(self) -> str:
        with suppress(OSError), connected(self.socket, _CONNECT_LIMIT_S) as sock:
            pid = credentials(sock)[0]
            if pid:  # 0 in another PID namespace
                return f"look for a disk that hangs (dmesg), or end it: kill -9 {pid}"
        return "look for a disk that hangs (dmesg), or end its process"


class _WatchedConnection(socket):
    """A connection on which a read waits as long as the daemon at its other end is alive.

    Raises TimeoutError after `silence_s` without an answer: neither to the request, nor to a
    question for its health.
    """

    def __init__(self, connection: socket, path: Path, silence_s: float) -> None:
        super().__init__(fileno=connection.detach())
        self._path = path
        self._step_s = silence_s / 2
        self.settimeout(self._step_s)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        """Receive bytes into a buffer, as `socket.recv_into` does."""
        while True:
            try:
                return super().recv_into(*args, **kwargs)
            except TimeoutError:
                self._check_alive()

    def _check_alive(self) -> None:
        try:
            health(self._path, self._step_s)
        except ValueError:
            pass  # an answer other than its health is a sign of life, too
        except OSError as exn:
            raise TimeoutError from exn


def shown(value: Any) -> Any:
    """Return JSON without terminal control sequences.

    Urls, names and reasons come from other users.
    """
    match value:
        case str():
            return printable(value)
        case list():
            return list(map(shown, value))
        case dict():
            return {name: shown(inner) for name, inner in value.items()}
    return value


def _lines_of(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of an answer as they arrive. Raises HTTPException if it is cut off.

    `HTTPResponse.readline` would take a connection that breaks between two chunks for the end.
    """
    rest = b""
    while piece := response.read1():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def error_of(status: int, reason: str, body: bytes) -> Exception:
    """Return the error that an answer's body holds, or a ProtocolError that says what it holds
    instead.
    """
    try:
        return from_json(shown(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = shown(body.decode(errors="replace")).strip()[:200]
        return ProtocolError(f"the daemon answered {status} {shown(reason)}: {text}")
