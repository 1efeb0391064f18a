"""Requests to a daemon's TCP port."""

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from email.message import Message
from typing import Any

from support.programs.guard import GUARD_S


@dataclass(frozen=True, slots=True)
class TcpAnswer:
    """A response."""

    status: int
    headers: Message
    body: bytes

    @property
    def lines(self) -> list[Any]:
        """Its JSON, line by line."""
        return [json.loads(line) for line in self.body.splitlines()]


def ask(port: int, path: str, method: str = "GET", **headers: str) -> TcpAnswer:
    """Send one request to a port of the loopback and return its answer.

    Args:
        headers: with underscores for hyphens.
    """
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        with connection.getresponse() as answer:
            return TcpAnswer(answer.status, answer.headers, answer.read())
