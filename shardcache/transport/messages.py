"""What the daemon and its transport workers say to each other: a line of JSON a message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardcache.transport.parts import Parts, PartSums

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP/1.1 request without a body.

    Attributes:
        headers: all but Host.
        proxy: url of an HTTP proxy on the way.
        ca_file: certificates to trust, for https; None for the system's.
        far_only: refuse hosts whose addresses turn out to be this node's own or its cloud's (`is_near`).
    """

    method: str
    url: str
    headers: Mapping[str, str]
    proxy: str | None = None
    ca_file: str | None = None
    far_only: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """The body that a request is made for, and where it goes. An answer that differs is not written.

    Attributes:
        status: that the answer must have.
        expected: by header, the values that the answer may have; None stands for its absence.
        held: keep the body in memory until it is committed.
        encoded_chunks: whether a body in chunks may have a Content-Encoding; such a body is encoded as it is sent, or
            stored like that.
    """

    parts: Parts
    status: int
    expected: Mapping[str, Sequence[str | None]]
    held: bool = False
    encoded_chunks: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request.

    Attributes:
        headers: names in lower case; of a repeated header, the values joined by ", ". None of them where `sums` are.
        sums: of the parts that were written; None where the answer was not as expected.
    """

    status: int
    headers: Mapping[str, str]
    sums: list[PartSums] | None = None

    def to_json(self) -> Message:
        """Return the answer as a message's value."""
        return {
            "status": self.status,
            "headers": dict(self.headers),
            "sums": self.sums and [(part.index, part.crc32c, part.checksum) for part in self.sums],
        }

    @classmethod
    def from_json(cls, value: Message) -> Answer:
        """Return the answer of a message's value."""
        sums = value["sums"] and [PartSums(*part) for part in value["sums"]]
        return cls(value["status"], value["headers"], sums)


def encoded(message: Message) -> bytes:
    """Return a message as its line."""
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> Message:
    """Return the message of a line."""
    message: Message = json.loads(line)
    return message


def request_to_json(request: Request, body: Body | None) -> Message:
    """Return what a worker is to do. By hand: `asdict` takes longer than all else that a part needs here."""
    message: Message = {name: getattr(request, name) for name in _REQUEST}
    if body is not None:
        message["body"] = {name: getattr(body, name) for name in _BODY}
        message["parts"] = {name: getattr(body.parts, name) for name in _PARTS}
    return message


def request_from_json(message: Message) -> tuple[Request, Body | None]:
    """Return what a worker is to do."""
    request = Request(**{name: message[name] for name in _REQUEST})
    if "body" not in message:
        return request, None
    return request, Body(Parts(**message["parts"]), **message["body"])


_REQUEST = [field.name for field in fields(Request)]
_BODY = [field.name for field in fields(Body) if field.name != "parts"]
_PARTS = [field.name for field in fields(Parts)]
