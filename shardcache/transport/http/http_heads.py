"""Heads of HTTP messages: written for requests, read from answers."""

import base64
import http.client
import io
import re
from typing import cast
from urllib.parse import SplitResult, unquote, urlsplit

from shardcache.transport.between.messages import Request

MAX_HEAD_BYTES = 64 * 1024
"""Limit for the head of an answer, interim answers included; S3 sends about 1 KiB."""

HEAD_REMEDY = "check that the url, or the proxy on the way to it, is a file server"
"""Remedy of the OriginError for a HeadError."""

ECHOED = re.compile(r"[\t\x20-\x7e\x80-\xff]+")
"""Values of headers that can be sent back: without line breaks, such as those of a folded one."""

PORTS = {"http": 80, "https": 443}

# A url, with path and query as its group.
_TARGET = re.compile(r"[a-z]+://[^/?#]*/?([^#]*)")
# The line before a chunk of a body, with the chunk's size as its group.
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\r?\n", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,19}")
_MAX_NUMBER = 2**63


def number_in(text: object) -> int | None:
    """Return the number of bytes that a header or an answer states.

    None unless it is of decimal digits, and below 2**63: `int` would take signs, underscores and
    other scripts' digits, and raise ValueError for thousands of digits.
    """
    if text is None:
        return None
    found = _NUMBER.fullmatch(str(text))
    if found is None:
        return None
    number = int(found[0])
    return number if number < _MAX_NUMBER else None


def request_head(request: Request) -> bytes:
    """Return the bytes of a request; a proxy of plain HTTP gets its whole url."""
    url = urlsplit(request.url)
    found = _TARGET.match(request.url)
    assert found is not None
    host = _host(url)
    target = f"/{found[1]}"
    headers = {"Host": host, "Accept-Encoding": "identity"}
    if request.proxy and url.scheme == "http" and request.via is None:
        target = f"http://{host}{target}"
        headers |= proxy_headers(request.proxy)
    headers |= request.headers

    lines = [f"{request.method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["", ""]
    return "\r\n".join(lines).encode("latin-1")


def _host(url: SplitResult) -> str:
    """Return the Host header of a url.

    Without its scheme's default port, which the SDK does not sign.
    """
    return url.netloc.rpartition("@")[2].removesuffix(f":{PORTS[url.scheme]}")


def proxy_headers(proxy: str) -> dict[str, str]:
    """Return the header with the credentials of a proxy's url, if it has any."""
    url = urlsplit(proxy)
    if url.username is None:
        return {}
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


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
                # With headers, `begin` would do nothing: it takes the answer for read.
                self.headers = cast(http.client.HTTPMessage, None)
                self.begin()
        finally:
            if not self.isclosed():
                self.fp = body

    def _read_next_chunk_size(self) -> int:
        """As in http.client, but for sizes with a sign: with a negative one, a body has no end."""
        found = _CHUNK.fullmatch(self.fp.readline(MAX_HEAD_BYTES))
        if found is None:
            raise http.client.HTTPException("invalid size of a chunk")
        return int(found[1], 16)


class _HeadLines:
    """Lines of an answer's head.

    http.client would take the end of the stream for the end of the head.
    """

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
            raise ConnectionResetError(
                "the server closed the connection before the end of the answer's headers",
            )
        return line

    def close(self) -> None:
        """Close the stream: the answer is not HTTP."""
        self._stream.close()
