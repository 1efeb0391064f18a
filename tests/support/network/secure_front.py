"""An https server before a plain one, which spoils answers as it is told to."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable
from contextlib import closing
from typing import TypeAlias
from urllib.parse import urlsplit

from support.network.scripted_server import Reply, ScriptedServer, cut_record, head
from support.programs.guard import GUARD_S
from support.stores.mischief import Ending

Spoiler: TypeAlias = Callable[[str, bytes], Reply]
"""Makes a reply of a request's target and its right answer."""


class SecureFront(ScriptedServer):
    """Passes requests without bodies on to a server of plain HTTP; a context manager."""

    def __init__(self, upstream_url: str, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self.context = context  # its certificate is that of all further connections
        self.spoiled = 0  # number of answers spoiled
        self._upstream = urlsplit(upstream_url).netloc
        self._spoiler: Spoiler | None = None
        self._method, self._once = "", False
        self._seen: set[tuple[str, ...]] = set()

    def spoil(self, spoiler: Spoiler, method: str, *, once: bool = False) -> None:
        """Spoil answers to requests of a method from now on; of each object and range the first alone, with `once`."""
        self._seen.clear()
        self._method, self._once, self._spoiler = method, once, spoiler

    def heal(self) -> None:
        self._spoiler = None

    def reply(self, head: str, number: int) -> Reply:
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        answer = self._pass_on(method, target, lines)
        spoiler = self._spoiler
        ranges = (line for line in lines if line.lower().startswith("range:"))
        if spoiler is None or method != self._method or not self._is_due(urlsplit(target).path, *ranges):
            return Reply(answer)
        return spoiler(target, answer)

    def _is_due(self, *request: str) -> bool:
        with self._changed:
            if self._once and request in self._seen:
                return False
            self._seen.add(request)
            self.spoiled += 1
        return True

    def _pass_on(self, method: str, target: str, lines: list[str]) -> bytes:
        connection = http.client.HTTPConnection(self._upstream, timeout=GUARD_S)
        with closing(connection):
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, _, value in (line.partition(":") for line in lines):
                connection.putheader(name, value.strip())
            connection.endheaders()
            answer = connection.getresponse()
            headers = (f"{name}: {value}" for name, value in answer.getheaders())
            return head(*headers, status=f"{answer.status} {answer.reason}") + answer.read()


def cut(target: str, answer: bytes) -> Reply:
    """Send half of an answer and the beginning of a TLS record, and close the connection."""
    return Reply(answer[: len(answer) // 2], Ending.CLOSE, cut_record)


def redirected(to_url: str) -> Spoiler:
    """Return a spoiler that redirects to the same target of another server."""
    return lambda target, answer: Reply(
        head(f"Location: {to_url}{target}", "Content-Length: 0", status="307 Temporary Redirect")
    )
