"""Web servers: one that remembers who came, and one that holds every byte back until the test lets it go."""

import hashlib
import re
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from support.programs.guard import GUARD_S


class Canary:
    """Listens on every address of this machine; a context manager.

    Attributes:
        redirects: where it sends whoever asks for a path, as status and Location.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._scheme = "http" if tls is None else "https"
        self.files: dict[str, bytes] = {}  # what it serves, by path
        self.redirects: dict[str, tuple[int, str]] = {}
        self.etag = '"1"'
        self.words = b""  # what it says in place of any answer
        self.bytewise = False  # whether an answer begins at once, and its bytes are sent as they may be
        self.connections = 0  # how many were made, whatever was asked
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path and headers of each request
        self._server = _Server(self)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self._scheme}://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]

    def version(self, _data: bytes) -> str:
        """Return the ETag of a file; where it is empty, none is sent."""
        return self.etag

    def wait(self, path: str, stop: int) -> int:
        """Return up to which byte a file may be sent, when that is `stop` at least."""
        return stop


class GatedStore(Canary):
    """Answers a ranged read once its last byte has been let go."""

    def __init__(self) -> None:
        super().__init__()
        self.etags = True  # whether answers tell the object's version
        self._open_until: dict[str, int] = {}
        self._changed = threading.Condition()

    def __exit__(self, *exc: object) -> None:
        for path in self.files:
            self.let(path[1:])
        super().__exit__(*exc)

    @property
    def asked(self) -> list[int]:
        """The first byte of every ranged read, in order."""
        ranges = (headers.get("Range") for _, _, headers in self.requests)
        return [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in ranges if asked]

    def put(self, name: str, body: bytes) -> str:
        """Store bytes, none of them let go yet; return their url."""
        with self._changed:
            self.files[f"/{name}"] = body
            self._open_until.setdefault(name, 0)
        return self.url(f"/{name}")

    def let(self, name: str, until_byte: int = 2**62) -> None:
        with self._changed:
            self._open_until[name] = until_byte
            self._changed.notify_all()

    def version(self, data: bytes) -> str:
        return f'"{hashlib.md5(data).hexdigest()}"' if self.etags else ""

    def wait(self, path: str, stop: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._open_until[path[1:]] >= stop, GUARD_S)
            return self._open_until[path[1:]]


class _Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True

    def __init__(self, canary: Canary) -> None:
        self.canary = canary
        super().__init__(("::", 0), _Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.canary.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that are reset."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        canary, path = self.server.canary, self.path
        canary.requests.append((self.command, path, dict(self.headers)))
        if canary.words:
            self.wfile.write(canary.words)
            self.close_connection = True
        elif path in canary.redirects:
            status, location = canary.redirects[path]
            self._head(status, 0, Location=location)
        elif path.partition("?")[0] in canary.files:
            self._answer_with(canary)
        else:
            self._head(404, 0)

    do_HEAD = do_GET  # noqa: N815  # as http.server calls it

    def log_message(self, *_args: object) -> None:
        """Write no log."""

    def _answer_with(self, canary: Canary) -> None:
        path = self.path.partition("?")[0]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and not canary.bytewise:
            canary.wait(path, int(asked[2]) + 1)
        data = canary.files[path]
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked else (0, len(data))
        etag = canary.version(data)
        if self.headers.get("If-Match", etag) != etag:
            self._head(412, 0)
            return
        headers = {"ETag": etag} if etag else {}
        headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"} if asked else {"Accept-Ranges": "bytes"}
        self._head(206 if asked else 200, stop - start, **headers)
        while start < stop and self.command != "HEAD":
            until = min(stop, canary.wait(path, start + 1)) if canary.bytewise else stop
            self.wfile.write(data[start:until])
            start = until

    def _head(self, status: int, size_bytes: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()
