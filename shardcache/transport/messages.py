"""Requests and answers: as values, as heads of HTTP messages, and as lines of JSON between daemon and workers.

In a head, a str stands for the bytes of its Latin-1 encoding: what a server sends is sent back as it came.
"""

import base64
import http.client
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlsplit

from shardcache.transport.parts import Parts, PartSums

Message = dict[str, Any]

MAX_HEAD_BYTES = 64 * 1024
"""Limit for the head of an answer, interim answers included; S3 sends about 1 KiB."""

HEAD_REMEDY = "check that the url, or the proxy on the way to it, is a file server"
"""Remedy of the OriginError for a HeadError."""

ECHOED = re.compile(r"[\t\x20-\x7e\x80-\xff]+")
"""Values of headers that can be sent back: without line breaks, such as those of a folded header."""

PORTS = {"http": 80, "https": 443}

_TARGET = re.compile(r"[a-z]+://[^/?#]*/?([^#]*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\r?\n", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP/1.1 request without a body."""

    method: str
    url: str
    headers: Mapping[str, str]  # all except Host
    proxy: str | None = None  # url of the HTTP proxy to use
    ca_file: str | None = None  # certificates to trust for https; None for the system's
    far_only: bool = False  # refuse hosts that resolve to this node or its cloud's metadata service (`is_near`)
    via: str | None = None  # Unix socket to send it to, without TLS, in place of the url's host; Host remains

    def beginning(self, size_bytes: int) -> "Request | None":
        """Return the request for the first bytes of its url; None for none of them."""
        headers = {**self.headers, "Range": f"bytes=0-{size_bytes - 1}"}
        return replace(self, method="GET", headers=headers) if size_bytes else None


@dataclass(frozen=True, slots=True)
class Body:
    """Expected body of an answer, and its destination. Any other answer is not written."""

    parts: Parts
    status: int
    expected: Mapping[str, Sequence[str | None]]  # permitted values by header; None permits its absence
    held: bool = False  # keep the body in memory until it is committed
    encoded_chunks: bool = True  # a chunked body may have a Content-Encoding, be it stored so or encoded on the fly


KEPT = frozenset({"x-shardcache-tier"})
"""Headers that an answer has even if it is as expected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request.

    Attributes:
        headers: by name in lower case, values of repeated headers joined by ", "; only those `KEPT` if there are
            `sums`.
        sums: checksums of the parts written; None if the answer was not as expected.
    """

    status: int
    headers: Mapping[str, str]
    sums: list[PartSums] | None = None

    def to_json(self) -> Message:
        """Return the answer as JSON."""
        return {
            "status": self.status,
            "headers": dict(self.headers),
            "sums": self.sums and [(part.index, part.crc32c, part.checksum) for part in self.sums],
        }

    @classmethod
    def from_json(cls, value: Message) -> "Answer":
        """Return the answer from its JSON."""
        sums = value["sums"] and [PartSums(*part) for part in value["sums"]]
        return cls(value["status"], value["headers"], sums)


def encoded(message: Message) -> bytes:
    """Encode a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> Message:
    """Decode a message from its line."""
    message: Message = json.loads(line)
    return message


def request_to_json(request: Request, body: Body | None) -> Message:
    """Return a request and its expected body as JSON; `asdict` would take longer than all else done here per part."""
    message: Message = {name: getattr(request, name) for name in _REQUEST}
    if body is not None:
        message["body"] = {name: getattr(body, name) for name in _BODY}
        message["parts"] = {name: getattr(body.parts, name) for name in _PARTS}
    return message


def request_from_json(message: Message) -> tuple[Request, Body | None]:
    """Return a request and its expected body from their JSON."""
    request = Request(**{name: message[name] for name in _REQUEST})
    if "body" not in message:
        return request, None
    return request, Body(Parts(**message["parts"]), **message["body"])


_REQUEST = [field.name for field in fields(Request)]
_BODY = [field.name for field in fields(Body) if field.name != "parts"]
_PARTS = [field.name for field in fields(Parts) if field.name != "fd"]  # that is sent by `descriptors`


def number_in(text: object) -> int | None:
    """Return the number of bytes in a header or in an answer; None unless it is of decimal digits, and below 2**63.

    `int` would take signs, underscores and other scripts' digits, and raise ValueError for thousands of digits.
    """
    found = None if text is None else _NUMBER.fullmatch(str(text))
    return int(found[0]) if found and int(found[0]) < 2**63 else None


class HeadError(http.client.HTTPException):
    """The head of an answer exceeds `MAX_HEAD_BYTES`."""

    def __init__(self) -> None:
        super().__init__(f"the head of the answer exceeds {MAX_HEAD_BYTES // 1024} KiB")


class Response(http.client.HTTPResponse):
    """An answer; `receive` reads its head."""

    def receive(self) -> None:
        """Read the head of the final answer, skipping interim answers. Raises HeadError."""
        body = self.fp
        self.fp = cast(io.BufferedReader, _HeadLines(body))
        try:
            self.begin()
            while 100 <= self.status < 200:  # http.client skips only 100
                self.headers = cast(http.client.HTTPMessage, None)
                self.begin()
        finally:
            if not self.isclosed():
                self.fp = body

    def _read_next_chunk_size(self) -> int:
        """As in http.client, where a size may have a sign, by which a body has no end."""
        found = _CHUNK.fullmatch(self.fp.readline(MAX_HEAD_BYTES))
        if found is None:
            raise http.client.HTTPException("invalid size of a chunk")
        return int(found[1], 16)


class _HeadLines:
    """Lines of an answer's head; http.client would take the end of the stream for the end of the head."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._left_bytes = MAX_HEAD_BYTES

    def readline(self, _limit: int) -> bytes:
        """Return the next line. Raises HeadError, and ConnectionResetError at the stream's end."""
        line = self._stream.readline(self._left_bytes + 1)
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            raise HeadError
        if not line:
            raise ConnectionResetError("the server closed the connection before the end of the answer's headers")
        return line

    def close(self) -> None:
        """Close the stream: the answer is not HTTP."""
        self._stream.close()


def request_head(request: Request) -> bytes:
    """Return the bytes of a request; a proxy of plain HTTP gets its whole url."""
    url, found = urlsplit(request.url), _TARGET.match(request.url)
    assert found is not None
    target, own = f"/{found[1]}", dict[str, str]()
    if request.proxy and url.scheme == "http" and request.via is None:
        target, own = f"http://{_host(url)}{target}", proxy_headers(request.proxy)
    headers = {"Host": _host(url), "Accept-Encoding": "identity", **own, **request.headers}
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def _host(url: SplitResult) -> str:
    """Return the Host header of a url, without its scheme's default port, which the SDK does not sign."""
    return url.netloc.rpartition("@")[2].removesuffix(f":{PORTS[url.scheme]}")


def proxy_headers(proxy: str) -> dict[str, str]:
    """Return the header with the credentials of a proxy's url, if it has any."""
    url = urlsplit(proxy)
    if url.username is None:
        return {}
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
