"""An HTTP server that holds every byte back until the test lets it go."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from support.programs.guard import GUARD_S


@dataclass(slots=True)
class GatedStore:
    """Serves objects over plain HTTP; a ranged read is answered once its last byte has been let go."""

    etags: bool = True  # whether answers tell the object's version
    bytewise: bool = False  # begin each answer at once, and send its bytes as they are let go
    asked: list[int] = field(default_factory=list)  # the first byte of every ranged read, in order
    _objects: dict[str, bytes] = field(default_factory=dict)
    _open_until: dict[str, int] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                store._answer(self)

            def do_GET(self) -> None:
                store._answer(self)

            def log_message(self, *_args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        for name in list(self._objects):
            self.let(name)
        self._server.shutdown()
        self._server.server_close()

    def put(self, name: str, body: bytes) -> str:
        """Store bytes, none of them let go yet; return their url."""
        assert self._server is not None
        with self._changed:
            self._objects[name] = body
            self._open_until.setdefault(name, 0)
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}"

    def let(self, name: str, until_byte: int = 2**62) -> None:
        with self._changed:
            self._open_until[name] = until_byte
            self._changed.notify_all()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.lstrip("/")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range") or "")
        with self._changed:
            start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
            if found:
                self.asked.append(start)
            if not self.bytewise:
                self._changed.wait_for(lambda: self._open_until[name] >= stop, GUARD_S)
            body = self._objects[name]
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        headers = {"ETag": etag} if self.etags else {}
        if request.headers.get("If-Match", etag) != etag:
            self._send(request, 412, {}, b"")
        elif found:
            stop = min(stop, len(body))
            content_range = f"bytes {start}-{stop - 1}/{len(body)}"
            headers |= {"Content-Range": content_range}
            if self.bytewise:
                self._send_bytewise(request, name, headers, start, body[:stop])
            else:
                self._send(request, 206, headers, body[start:stop])
        else:
            self._send(request, 200, headers | {"Accept-Ranges": "bytes"}, body)

    def _send_bytewise(
        self, request: BaseHTTPRequestHandler, name: str, headers: dict[str, str], start: int, body: bytes
    ) -> None:
        self._send_head(request, 206, headers, len(body) - start)
        while start < len(body):
            with self._changed:
                self._changed.wait_for(lambda: self._open_until[name] > start, GUARD_S)  # noqa: B023
                stop = self._open_until[name]
            request.wfile.write(body[start:stop])
            start = stop

    @classmethod
    def _send(cls, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
        cls._send_head(request, status, headers, len(body))
        if request.command == "GET":
            request.wfile.write(body)

    @staticmethod
    def _send_head(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content_bytes: int) -> None:
        request.send_response(status)
        for field_name, value in {**headers, "Content-Length": str(content_bytes)}.items():
            request.send_header(field_name, value)
        request.end_headers()
