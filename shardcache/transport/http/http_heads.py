"""Heads of HTTP messages: written for requests, read from answers."""

import base64
import http.client
import io
import re
import socket
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
_STATUS_LINE = re.compile(rb"HTTP/(0\.9|1\.[0-9])[ \t]+([1-9][0-9]{2})(?:[ \t].*)?\r?\n", re.DOTALL)
_OLD_VERSIONS = (b"0.9", b"1.0")
# Versions as http.client numbers them.
_HTTP_1_0 = 10
_HTTP_1_1 = 11
_BODILESS = (204, 304)
_NAME = re.compile(r"[!-9;-~]+")
_SPACE = " \t\r\n"


def number_in(text: object) -> int | None:
    """Return the number of bytes that a header or an answer states.

    None unless it is of decimal digits, and below 2**63: `int` would take signs, underscores and
    other scripts' digits, and raise ValueError for thousands of digits.
    """
    if text is None:
        return None
    digits = _NUMBER.fullmatch(str(text))
    if digits is None:
        return None
    number = int(digits[0])
    return number if number < _MAX_NUMBER else None


def request_head(request: Request) -> bytes:
    """Return the bytes of a request; a proxy of plain HTTP gets its whole url."""
    url = urlsplit(request.url)
    path_and_query = _TARGET.match(request.url)
    assert path_and_query is not None
    host = _host(url)
    target = f"/{path_and_query[1]}"
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
    """Return the Host header of a url, without the default port, which the SDK does not sign."""
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
    """An answer; `receive` reads its head.

    http.client would read it with a parser of mail, which takes longer than all else that is done
    for a small range.

    Attributes:
        head: the headers by name in lower case, values of repeated headers joined by ", ".
    """

    head: dict[str, str]

    def __init__(self, sock: socket.socket, method: str) -> None:
        super().__init__(sock, method=method)
        self._answers_head = method == "HEAD"  # without a body, whatever its headers state

    def receive(self) -> None:
        """Read the head of the final answer, skipping interim answers.

        Raises HeadError, and BadStatusLine if the answer is not HTTP.
        """
        lines = _HeadLines(self.fp)
        self._receive_head(lines)
        while 100 <= self.status < 200:
            self._receive_head(lines)

    def _receive_head(self, lines: "_HeadLines") -> None:
        """Read one head, and what it says of the body and the connection."""
        line = lines.readline()
        status_line = _STATUS_LINE.fullmatch(line)
        if status_line is None:
            raise http.client.BadStatusLine(line.decode("latin-1"))
        self.version = _HTTP_1_0 if status_line[1] in _OLD_VERSIONS else _HTTP_1_1
        self.status = int(status_line[2])
        self.head = _headers_in(lines)

        self.chunked = self.head.get("transfer-encoding", "").lower() == "chunked"
        self.chunk_left = None
        self.length = None if self.chunked else number_in(self.head.get("content-length"))
        if self._answers_head or self.status in _BODILESS:
            self.length = 0
        ends_with_body = not self.chunked and self.length is None
        self.will_close = ends_with_body or not self._is_kept_alive()

    def _is_kept_alive(self) -> bool:
        connection = self.head.get("connection", "").lower()
        if self.version == _HTTP_1_1:
            return "close" not in connection
        return "keep-alive" in connection or "keep-alive" in self.head

    def _read_next_chunk_size(self) -> int:
        """As in http.client, which takes sizes with a sign: with a negative one, a body never ends.

        Raises HTTPException for those.
        """
        line = _CHUNK.fullmatch(self.fp.readline(MAX_HEAD_BYTES))
        if line is None:
            raise http.client.HTTPException("invalid size of a chunk")
        return int(line[1], 16)


def _headers_in(lines: "_HeadLines") -> dict[str, str]:
    """Return the headers of a head, up to the empty line at its end."""
    names: list[str] = []
    values: list[str] = []
    while True:
        text = lines.readline().decode("latin-1")
        if text in ("\r\n", "\n"):
            break
        if text[0] in " \t" and values:  # a folded line, whose value nobody sends back (`ECHOED`)
            values[-1] += text
            continue
        name, colon, value = text.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise http.client.HTTPException("invalid header in the answer")
        names.append(name.lower())
        values.append(value)

    headers: dict[str, str] = {}
    for name, padded_value in zip(names, values, strict=True):
        value = padded_value.strip(_SPACE)
        earlier = headers.get(name)
        if earlier is None:
            headers[name] = value
        elif name == "content-length" and value == earlier:
            continue  # the same length counts once
        else:
            headers[name] = f"{earlier}, {value}"
    return headers


class _HeadLines:
    """Lines of an answer's head.

    http.client would take the end of the stream for the end of the head.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._left_bytes = MAX_HEAD_BYTES

    def readline(self) -> bytes:
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
