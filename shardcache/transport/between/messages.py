"""Requests and answers as values, and as lines of JSON between the daemon and its workers.

Headers are text decoded as Latin-1, which has a character for every byte. So a server's ETag, say,
is sent back to it with the bytes that it had, whatever they mean.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from shardcache.transport.between.parts import Parts, PartSums

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP/1.1 request without a body.

    Attributes:
        headers: all except Host.
        proxy: url of the HTTP proxy to use.
        ca_file: path of the certificates to trust for https; None for the system's.
        far_only: True to refuse hosts that resolve to this node or its cloud's metadata service
            (`is_near`).
        via: path of a Unix socket to send it to, without TLS, in place of the url's host; Host
            remains.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    proxy: str | None = None
    ca_file: str | None = None
    far_only: bool = False
    via: str | None = None

    def beginning(self, size_bytes: int) -> "Request | None":
        """Return the request for the first `size_bytes` of its url; None if that is 0."""
        if not size_bytes:
            return None
        headers = {**self.headers, "Range": f"bytes=0-{size_bytes - 1}"}
        return replace(self, method="GET", headers=headers)


@dataclass(frozen=True, slots=True)
class Body:
    """Expected body of an answer, and its destination. Any other answer is not written.

    Attributes:
        expected: permitted values by header; None permits its absence.
        held: True to keep the body in memory until it is committed.
        encoded_chunks: True if a chunked body may have a Content-Encoding. A server that encodes
            bodies on the fly sends other bytes than it stores: False for such servers.
    """

    parts: Parts
    status: int
    expected: Mapping[str, Sequence[str | None]]
    held: bool = False
    encoded_chunks: bool = True


KEPT_HEADERS = frozenset({"x-shardcache-tier"})
"""The headers of an answer whose body was written; all others are left out of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request.

    Attributes:
        headers: by name in lower case, values of repeated headers joined by ", "; only
            `KEPT_HEADERS` if there are `sums`.
        sums: checksums of the parts written; None if the answer was not as expected.
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
# `descriptors` sends the descriptor over a socket; the worker that receives it sets `fd`.
_PARTS_FIELDS = [field.name for field in fields(Parts) if field.name != "fd"]


def request_to_json(request: Request, body: Body | None) -> Message:
    """Return a request and its expected body as JSON."""
    # `dataclasses.asdict` would take longer than all else done here per part.
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
