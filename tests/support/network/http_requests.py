"""Single requests of HTTP, each over a connection of its own, and their answers."""

import json
from collections.abc import Mapping
from contextlib import closing
from email.message import Message
from http.client import HTTPConnection
from typing import Any, NamedTuple

from support.programs.guard import GUARD_S


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
