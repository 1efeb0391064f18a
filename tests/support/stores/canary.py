"""A web server that remembers who came: what must not be asked is asked of it, or not."""

from __future__ import annotations

import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Canary:
    """Listens on every address of this machine; a context manager.

    Attributes:
        redirects: where it sends whoever asks for a path, as status and Location.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen; with key and certificate, for https."""
        self._scheme = "http" if tls is None else "https"
        self.files: dict[str, bytes] = {}  # what it serves, by path
        self.redirects: dict[str, tuple[int, str]] = {}
        self.etag = '"1"'  # what it says of every file
        self.words = b""  # what it says in place of any answer
        self.connections = 0  # how many were made, whatever was asked
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # of each request, method, path and headers
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
        """Where it listens."""
        return int(self._server.server_address[1])

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self._scheme}://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]


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
            self._answer(status, b"", Location=location)
        elif (data := canary.files.get(path.partition("?")[0])) is not None:
            self._answer_with(data)
        else:
            self._answer(404, b"")

    do_HEAD = do_GET  # noqa: N815  # as http.server calls it

    def log_message(self, *_args: object) -> None:
        """Write no log."""

    def _answer_with(self, data: bytes) -> None:
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        if not asked:
            self._answer(200, data, ETag=self.server.canary.etag)
            return
        start, _, last = asked.partition("-")
        part = data[int(start) : int(last) + 1]
        shown = {"Content-Range": f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"}
        self._answer(206, part, ETag=self.server.canary.etag, **shown)

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
