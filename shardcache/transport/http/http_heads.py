"""Heads of HTTP messages: written for requests, read from answers.

A head is everything before the body: the request line or status line, and the headers. Interim
answers, with a status of 100 to 199, precede the final one. An `Exchange` uses this module in place
of http.client's own parser, which is slower and less strict.
"""

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
"""Remedy of the OriginError that the daemon raises if a worker reports a HeadError."""

SENDABLE = re.compile(r"[\t\x20-\x7e\x80-\xff]+")
"""Pattern of the header values that can be sent back to a server.

The value of a header that was folded over several lines contains line breaks, which cannot be sent.
"""

PORTS = {"http": 80, "https": 443}

# A url; the group is its path and query, without the leading slash.
_TARGET = re.compile(r"[a-z]+://[^/?#]*/?([^#]*)")
# The line before a chunk of a chunked body; the group is the chunk's size, in hexadecimal digits.
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\r?\n", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,19}")
_TOO_LARGE = 2**63
_STATUS_LINE = re.compile(rb"HTTP/(0\.9|1\.[0-9])[ \t]+([1-9][0-9]{2})(?:[ \t].*)?\r?\n", re.DOTALL)
_OLD_VERSIONS = (b"0.9", b"1.0")
# http.client numbers the versions of HTTP in this way.
_HTTP_1_0 = 10
_HTTP_1_1 = 11
_BODILESS = (204, 304)  # statuses of answers that have no body
_NAME = re.compile(r"[!-9;-~]+")  # a header's name: visible ASCII characters except the colon
_SPACE = " \t\r\n"


def number_in(text: object) -> int | None:
    """Return the number that a header or a field of JSON states.

    Return None for a missing value (None), for anything but decimal digits, and for 2**63 or more.
    `int` alone would accept signs, underscores and the digits of other scripts, and would raise
    ValueError for thousands of digits.
    """
    if text is None:
        return None
    digits = _NUMBER.fullmatch(str(text))
    if digits is None:
        return None
    number = int(digits[0])
    return number if number < _TOO_LARGE else None


def request_head(request: Request) -> bytes:
    """Return the bytes of a request, which has no body.

    The request line has the path and query; for a proxy of plain HTTP, it has the whole url.
    """
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
    """Return the Host header of a url.

    A default port is left out, as the SDK that signs S3 requests signs the header without it.
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
    """An answer, whose head is read by `read_head`.

    http.client would read the head with a parser for mail, which takes longer than everything else
    that is done for a request of a few bytes.

    Attributes:
        head: the headers' values by name in lower case; the values of a repeated header are joined
            by ", ".
    """

    head: dict[str, str]

    def __init__(self, sock: socket.socket, method: str) -> None:
        super().__init__(sock, method=method)
        # An answer to HEAD has no body, whatever its headers state.
        self._method_is_head = method == "HEAD"

    def read_head(self) -> None:
        """Read the head of the final answer, skipping interim answers.

        Raises HeadError, and BadStatusLine if the answer is not HTTP.
        """
        lines = _HeadLines(self.fp)
        self._read_next_head(lines)
        while 100 <= self.status < 200:
            self._read_next_head(lines)

    def _read_next_head(self, lines: "_HeadLines") -> None:
        """Read one head, and set `head` and the attributes that http.client derives from a head.

        The latter are `version`, `status`, `length`, `chunked`, `chunk_left` and `will_close`.
        """
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
        if self._method_is_head or self.status in _BODILESS:
            self.length = 0
        # A body without a stated length ends when the server closes the connection.
        ends_with_body = not self.chunked and self.length is None
        self.will_close = ends_with_body or not self._is_kept_alive()

    def _is_kept_alive(self) -> bool:
        """Return whether the server keeps the connection open, as far as the headers tell."""
        connection = self.head.get("connection", "").lower()
        if self.version == _HTTP_1_1:
            return "close" not in connection
        return "keep-alive" in connection or "keep-alive" in self.head

    def _read_next_chunk_size(self) -> int:
        """Read the size of the next chunk.

        This replaces the method of http.client, which accepts a size with a sign: after a negative
        size, a body would never end. Raises HTTPException for such a size.
        """
        line = _CHUNK.fullmatch(self.fp.readline(MAX_HEAD_BYTES))
        if line is None:
            raise http.client.HTTPException("invalid size of a chunk")
        return int(line[1], 16)


def _headers_in(lines: "_HeadLines") -> dict[str, str]:
    """Read the rest of a head; return its headers' values by name in lower case."""
    headers: dict[str, str] = {}
    for name, value in _fields_in(lines):
        earlier = headers.get(name)
        if earlier is None:
            headers[name] = value
        elif name == "content-length" and value == earlier:
            continue  # the same length twice is no contradiction, so it counts once
        else:
            headers[name] = f"{earlier}, {value}"
    return headers


def _fields_in(lines: "_HeadLines") -> list[tuple[str, str]]:
    """Read lines up to the empty line at the head's end; return the name and value of each header.

    Names are in lower case. Raises http.client.HTTPException for a line that is not a header.
    """
    names: list[str] = []
    values: list[str] = []
    while True:
        text = lines.readline().decode("latin-1")
        if text in ("\r\n", "\n"):
            return [(name, value.strip(_SPACE)) for name, value in zip(names, values, strict=True)]
        # A line that begins with white space continues the header before it (it is folded). The
        # line break stays in the value, so the value does not match `SENDABLE`.
        if text[0] in " \t" and values:
            values[-1] += text
            continue
        name, colon, value = text.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise http.client.HTTPException("invalid header in the answer")
        names.append(name.lower())
        values.append(value)


class _HeadLines:
    """Lines of an answer's heads, the interim ones included, whose total size is limited.

    The end of the stream within a head is an error here. http.client would take it for the end of
    the head.
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
