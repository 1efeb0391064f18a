"""Requests and answers as values, and as lines of JSON between the daemon and its workers.

Origins in the daemon build a `Request` and the `Body` that they expect; a worker carries the
request out and returns an `Answer`. A part is the unit in which a file is checksummed and recorded.
A held body waits in the worker's memory until the daemon commits it, that is, allows it to be
written. The tier is a cache of objects that the nodes of a cluster share.

Headers are text decoded as Latin-1, which has a character for every byte. So a header's value, such
as an ETag, can be sent back to its server with exactly the bytes that the server sent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from shardcache.transport.between.parts import Parts, PartSums

Message = dict[str, Any]
"""A message's fields; "do" names the daemon's command, "is" the event that a worker reports."""


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP/1.1 request without a body.

    Attributes:
        headers: all headers except Host, which is that of the url.
        proxy: url of the HTTP proxy to use; None for a direct connection.
        ca_file: path of the certificates to trust for https; None for the system's.
        far_only: True to refuse hosts whose name resolves to this node or to its cloud's metadata
            service (`is_near`).
        via: path of a Unix socket to which the request is sent, without TLS, in place of the url's
            host; None to connect to the host. The Host header is that of the url in both cases.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    proxy: str | None = None
    ca_file: str | None = None
    far_only: bool = False
    via: str | None = None

    def beginning(self, size_bytes: int) -> "Request | None":
        """Return a request for the first bytes of this request's object; None for 0 bytes."""
        if not size_bytes:
            return None
        headers = {**self.headers, "Range": f"bytes=0-{size_bytes - 1}"}
        return replace(self, method="GET", headers=headers)


@dataclass(frozen=True, slots=True)
class Body:
    """Expected body of an answer, and its destination.

    The body of an answer with another status, size or header is not written.

    Attributes:
        parts: the parts of the file that the body is written to; their size is the expected one.
        status: the expected status.
        expected: the permitted values of headers, by name in lower case; with None among them, the
            header may be missing.
        held: True to keep the body in memory until it is committed.
        encoded_chunks: True if a chunked body may have a Content-Encoding. It is False for servers
            that may compress bodies as they send them, so that the bytes differ from the stored
            ones.
    """

    parts: Parts
    status: int
    expected: Mapping[str, Sequence[str | None]]
    held: bool = False
    encoded_chunks: bool = True


KEPT_HEADERS = frozenset({"x-shardcache-tier"})
"""The only headers that are passed to the daemon with an answer whose body was written.

This one says how the tier has answered the request.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request.

    Attributes:
        headers: values by name in lower case; the values of a repeated header are joined by ", ".
            If the body was written, only `KEPT_HEADERS` are present.
        sums: checksums of the parts written; None if the answer was not as expected, or no body was
            to be written.
    """

    status: int
    headers: Mapping[str, str]
    sums: list[PartSums] | None = None

    def to_json(self) -> Message:
        """Return the answer as JSON."""
        sums = None
        if self.sums is not None:
            sums = [(part.index, part.crc32c, part.checksum) for part in self.sums]
        return {"status": self.status, "headers": dict(self.headers), "sums": sums}

    @classmethod
    def from_json(cls, value: Message) -> "Answer":
        """Return the answer from its JSON."""
        sums = None
        if value["sums"] is not None:
            sums = [PartSums(*part) for part in value["sums"]]
        return cls(value["status"], value["headers"], sums)


def encoded(message: Message) -> bytes:
    """Encode a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> Message:
    """Decode a message from its line."""
    message: Message = json.loads(line)
    return message


_REQUEST_FIELDS = [field.name for field in fields(Request)]
_BODY_FIELDS = [field.name for field in fields(Body) if field.name != "parts"]
# A descriptor is sent over a socket (see `descriptors`) rather than in a message. The worker has
# another number for its copy of the descriptor, and sets `fd` itself.
_PARTS_FIELDS = [field.name for field in fields(Parts) if field.name != "fd"]


def request_to_json(request: Request, body: Body | None) -> Message:
    """Return a request and its expected body as JSON; `body` is None if none is to be written."""
    # `dataclasses.asdict` would take longer than everything else that the daemon does for a part.
    message: Message = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    if body is not None:
        message["body"] = {name: getattr(body, name) for name in _BODY_FIELDS}
        message["parts"] = {name: getattr(body.parts, name) for name in _PARTS_FIELDS}
    return message


def request_from_json(message: Message) -> tuple[Request, Body | None]:
    """Return a request and its expected body from their JSON."""
    request = Request(**{name: message[name] for name in _REQUEST_FIELDS})
    if "body" not in message:
        return request, None
    parts = Parts(**message["parts"])
    return request, Body(parts, **message["body"])
