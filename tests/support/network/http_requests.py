"""HTTP requests as servers read them, and single ones that clients send alone."""

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from support.programs.guard import GUARD_S

_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a server reads it; the names of its headers are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @classmethod
    def parse(cls, head: str) -> Self:
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        return cls(method, target, {name.lower(): value.strip() for name, _, value in pairs})

    @property
    def path(self) -> str:
        """Path and query without the leading slash; a proxy passes a whole url on."""
        path, _, _query = self.target.partition("?")
        if self.target.startswith("http"):
            path = urlsplit(self.target).path
        return unquote(path).lstrip("/")

    @property
    def key(self) -> str:
        """Path without its first folder, which is the bucket."""
        return self.path.partition("/")[2]

    @property
    def part(self) -> slice | None:
        """Range of bytes that is asked for; None for all of them."""
        # RFC 9110, 14.2: a Range that cannot be read is no Range.
        found = _RANGE.fullmatch(self.headers.get("range", ""))
        if found is None:
            return None
        first, last = found.groups()
        if not first:
            return slice(-int(last), None) if last else None
        if not last:
            return slice(int(first), None)
        return slice(int(first), int(last) + 1) if int(first) <= int(last) else None


class Answer(NamedTuple):
    status: int
    headers: Message  # by name in any case
    body: bytes

    @property
    def lines(self) -> list[Any]:
        """Its JSON, line by line."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def code(self) -> str:
        """Code of S3's error document."""
        return self.body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()


def answered(
    connection: HTTPConnection,
    target: str,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    body: bytes | None = None,
) -> Answer:
    """Send the one request of a connection, and return its answer."""
    with closing(connection):
        connection.request(method, target, body, headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send one request to a port of the loopback and return its answer.

    Args:
        headers: with underscores for hyphens.
    """
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return answered(HTTPConnection("127.0.0.1", port, timeout=GUARD_S), path, named, method)
