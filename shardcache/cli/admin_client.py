"""The commands' client of the daemon's admin API, over the daemon's Unix socket.

An answer is one JSON object, or lines of JSON that arrive one by one. The lines are the rows of a
list or, for long work, events, of which the last is `done`. A private daemon is one that a single
user has started, in contrast to the node's.
"""

import json
import os
import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import quote

from shardcache.shared.credentials.handed_credentials import handed_over
from shardcache.shared.exceptions import DaemonError, NoDaemonError, ProtocolError, from_json
from shardcache.shared.private import node_has_daemon, tool_socket
from shardcache.shared.protocol import Json, Wanted
from shardcache.shared.unix_socket import connected, health, peer_ids
from shardcache.shared.wording.redact import printable

Lines = Generator[Json, None, None]
"""Lines of an answer as they arrive.

A caller that may stop reading early must close the generator, as with `contextlib.closing`, to free
the connection.
"""

_CONNECT_LIMIT_S = 10.0
_SHOWN_CHARS = 200  # errors quote at most this much of an answer that is not a daemon's


class AdminClient:
    """The admin API of one daemon. Each request has a connection of its own.

    Every method raises NoDaemonError if nothing answers at the socket, DaemonError if this user may
    not use it, ProtocolError for an answer that is not a daemon's, and any error that the daemon
    returns.

    Args:
        path: path of the daemon's socket; None for the default socket.
        silence_s: the daemon counts as hung if for this time it neither sends bytes of its answer
            nor answers health checks. So long work, such as warming a whole dataset, may take any
            time while the daemon answers health checks.
    """

    def __init__(self, path: Path | None = None, silence_s: float = 10.0) -> None:
        self._path = tool_socket(path)
        self._is_default_path = path is None
        self._silence_s = silence_s

    def status(self) -> Json:
        """Return the state of the daemon, its cache and its readers."""
        return self._request_json("GET", "/v1/status")

    def credentials(self) -> Json:
        """Return this user's keys for the S3 endpoint, in the JSON that AWS's SDKs expect."""
        return self._request_json("POST", "/v1/credentials")

    def evict(self, urls: Sequence[str]) -> Json:
        """Evict the matching shards; return those `evicted`, and those `kept` with the reason."""
        return self._request_json("POST", "/v1/evict", {"urls": urls})

    def unpin(self, urls: Sequence[str]) -> Json:
        """Unpin the matching shards; return those `unpinned`, and those `kept` with the reason."""
        return self._request_json("POST", "/v1/unpin", {"urls": urls})

    def pins(self) -> Lines:
        """Yield the pinned shards."""
        return self._request_lines("GET", "/v1/pins")

    def pin(self, urls: Sequence[str]) -> Lines:
        """Pin the shards of `urls`, and yield events until each is cached or has failed."""
        return self._until_done("/v1/pin", {"urls": urls})

    def shards(self, prefix: str) -> Lines:
        """Yield the cached shards whose url starts with `prefix`."""
        return self._request_lines("GET", f"/v1/shards?prefix={quote(prefix, safe='')}")

    def warm(self, urls: Sequence[str], wanted: Wanted = "shards") -> Lines:
        """Yield events until everything at `urls` is cached or has failed.

        Args:
            urls: the shards or files.
            wanted: "shards" to cache shards of samples, "files" to cache the objects' own bytes.
        """
        return self._until_done("/v1/warm", {"urls": urls, "wanted": wanted})

    def index(self, urls: Sequence[str], tokens: str | None = None) -> Lines:
        """Yield events until the samples in every shard of `urls` have been counted.

        Args:
            urls: the shards.
            tokens: the samples' member whose tokens are counted, too; None to count no tokens.
        """
        body: Json = {"urls": urls}
        if tokens is not None:
            body["tokens"] = tokens
        return self._until_done("/v1/index", body)

    def verify(self, prefix: str) -> Lines:
        """Yield events until every cached shard whose url starts with `prefix` is verified."""
        return self._until_done("/v1/verify", {"prefix": prefix})

    def _request_json(self, method: str, path: str, body: Json | None = None) -> Json:
        """Return the answer to a request, which is one JSON object.

        Args:
            method: "GET" or "POST".
            path: path of the API, with the query.
            body: body of the request; None for a request without a body.
        """
        with self._open_answer(method, path, body) as response:
            answer: Json = _printable_json(json.loads(response.read()))
            return answer

    def _request_lines(self, method: str, path: str, body: Json | None = None) -> Lines:
        """Yield the lines of the answer to a request; raise the error that a line reports.

        The arguments are those of `_request_json`.
        """
        # A POST starts work that may fetch shards. Unless the user named a socket, the work goes to
        # the daemon that has this process's credentials. A private daemon gets the credentials with
        # the request.
        if method == "POST" and self._is_default_path:
            self._path = tool_socket(fetches=True)
            own_credentials = handed_over(os.environ)
            if own_credentials and not node_has_daemon():
                body = dict(body or {}, credentials=own_credentials)
        with self._open_answer(method, path, body) as response:
            for line in _lines_of(response):
                event = _printable_json(json.loads(line))
                if event.get("event") == "failed":
                    raise from_json(event["error"])
                yield event

    def _until_done(self, path: str, body: Json) -> Lines:
        """Yield the events of long work, up to the last event, `done`.

        Raises NoDaemonError if the daemon stopped before that event.
        """
        is_done = False
        with closing(self._request_lines("POST", path, body)) as events:
            for event in events:
                yield event
                is_done = event.get("event") == "done"
        if not is_done:
            raise NoDaemonError(
                "the daemon stopped before it finished the request",
                url=str(self._path),
            )

    @contextmanager
    def _open_answer(self, method: str, path: str, body: Json | None) -> Iterator[HTTPResponse]:
        """Yield the answer to a request, after its head has been read.

        Errors of the connection become errors with a remedy, also while the caller's block reads
        from the answer. The arguments are those of `_request_json`.
        """
        where = str(self._path)
        content: bytes | None = None
        headers: dict[str, str] = {}
        if body is not None:
            content = json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
        # The name is used only for the header Host, as the connection is to a Unix socket.
        with closing(HTTPConnection("shardcache")) as connection:
            try:
                connection.sock = self._connect()
                # A daemon that refuses the connection answers and closes it before it reads the
                # request, so that sending fails although there is an answer.
                with suppress(BrokenPipeError):
                    connection.request(method, path, content, headers)
                with connection.getresponse() as response:
                    if response.status >= HTTPStatus.BAD_REQUEST:
                        raise _error_of(response.status, response.reason, response.read())
                    yield response
            except TimeoutError as exn:
                raise NoDaemonError(
                    "the daemon accepts connections but does not answer within "
                    f"{self._silence_s:g} s",
                    url=where,
                    remedy=self._how_to_end_the_daemon(),
                ) from exn
            except (HTTPException, ConnectionError) as exn:
                cause = str(exn) or type(exn).__name__
                raise NoDaemonError(
                    f"the connection to the daemon broke: {cause}",
                    url=where,
                ) from exn
            except ValueError as exn:  # raised by `json.loads` in the caller's block
                raise ProtocolError(
                    f"the daemon's answer is not JSON: {exn}",
                    url=where,
                ) from exn

    def _connect(self) -> socket:
        """Return a connection to the daemon. Raises DaemonError, NoDaemonError."""
        where = str(self._path)
        try:
            sock = connected(self._path, _CONNECT_LIMIT_S)
        except PermissionError as exn:
            raise DaemonError(
                "you may not use the daemon's socket",
                url=where,
                remedy="join the group that owns it "
                f"(ls -l {shlex.quote(where)}), then log in again",
            ) from exn
        except BlockingIOError as exn:  # the socket's queue of connections is full
            raise NoDaemonError(
                "a daemon listens at the socket, but accepts no connections",
                url=where,
                remedy=self._how_to_end_the_daemon(),
            ) from exn
        except OSError as exn:
            raise NoDaemonError(
                "no daemon listens at the socket",
                url=where,
                remedy=f"start it: {self._start_command()}",
            ) from exn
        return _WatchedConnection(sock, self._path, self._silence_s)

    def _start_command(self) -> str:
        """Return an example of a command that starts a daemon at this socket."""
        options = "--cache-dir /path/on/local/disk --capacity 500GB"
        if not self._is_default_path:
            options = f"--socket {shlex.quote(str(self._path))} {options}"
        return f"shardcache serve {options}"

    def _how_to_end_the_daemon(self) -> str:
        """Return the remedy for a daemon that does not answer, with its process id if known."""
        with suppress(OSError), connected(self._path, _CONNECT_LIMIT_S) as sock:
            pid, _, _ = peer_ids(sock)
            if pid:  # the kernel gives 0 for a process in another PID namespace
                return f"look for a disk that hangs (dmesg), or end it: kill -9 {pid}"
        return "look for a disk that hangs (dmesg), or end its process"


class _WatchedConnection(socket):
    """A connection on which a read waits for as long as the daemon at the other end is alive.

    A read raises TimeoutError if the daemon sent nothing, and answered no health check, for
    `silence_s`.
    """

    def __init__(self, connection: socket, path: Path, silence_s: float) -> None:
        super().__init__(fileno=connection.detach())
        self._path = path
        # A silent read times out after half of the time; the health check may take the other half.
        self._half_silence_s = silence_s / 2
        self.settimeout(self._half_silence_s)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        """Receive bytes into a buffer, as `socket.recv_into` does."""
        while True:
            try:
                return super().recv_into(*args, **kwargs)
            except TimeoutError:
                self._check_alive()

    def _check_alive(self) -> None:
        """Raise TimeoutError unless the daemon answers a health check."""
        try:
            health(self._path, self._half_silence_s)
        except ValueError:
            pass  # a malformed answer is a sign of life, too
        except OSError as exn:
            raise TimeoutError from exn


def _printable_json(value: Any) -> Any:
    """Return a JSON value with terminal control sequences removed from its texts.

    The texts are not trusted: urls, names and reasons come from other users.
    """
    match value:
        case str():
            return printable(value)
        case list():
            return list(map(_printable_json, value))
        case dict():
            return {name: _printable_json(inner) for name, inner in value.items()}
    return value


def _lines_of(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of an answer as they arrive. Raises HTTPException if the answer is cut off.

    `HTTPResponse.readline` is not used, since it takes a connection that breaks between two chunks
    for the end of the answer.
    """
    partial_line = b""
    while piece := response.read1():
        *complete_lines, partial_line = (partial_line + piece).split(b"\n")
        yield from complete_lines
    if partial_line:
        yield partial_line


def _error_of(status: int, reason: str, body: bytes) -> Exception:
    """Return the error that an answer's body holds, or a ProtocolError that quotes the body."""
    try:
        return from_json(_printable_json(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = printable(body.decode(errors="replace")).strip()[:_SHOWN_CHARS]
        return ProtocolError(f"the daemon answered {status} {printable(reason)}: {text}")
