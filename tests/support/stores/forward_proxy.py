"""An HTTP proxy between clients and any server, which notes what it is asked for."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlsplit

_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 64 * 1024


class ForwardProxy:
    """Listens on a free port of 127.0.0.1; use it as `async with`.

    Args:
        user, password: without which nothing is passed on; None for anybody.

    Attributes:
        targets: that a connection was made for, a url or, by CONNECT, host and port.
        denied: number of requests without the right credentials.
    """

    def __init__(self, user: str | None = None, password: str = "") -> None:
        self._user, self._password = user, password
        self._clients: set[asyncio.StreamWriter] = set()
        self.targets: list[str] = []
        self.denied = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in list(self._clients):
            writer.transport.abort()
        await self._server.wait_closed()

    def url(self, password: str | None = None) -> str:
        """Return its url, with the credentials; the right ones by default."""
        port = self._server.sockets[0].getsockname()[1]
        pair = (
            f"{quote(self._user)}:{quote(self._password if password is None else password, '')}@" if self._user else ""
        )
        return f"http://{pair}127.0.0.1:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._pass_on(reader, writer)
        self._clients.discard(writer)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, *_ = head.decode("latin-1").split()
        if not self._is_allowed(head):
            self.denied += 1
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        self.targets.append(target)
        tunnel = method == "CONNECT"
        url = urlsplit(f"//{target}" if tunnel else target)
        far_reader, far_writer = await asyncio.open_connection(url.hostname, url.port or _PORTS[url.scheme])
        if tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            far_writer.write(head)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, far_writer))
            group.create_task(_pump(far_reader, writer))

    def _is_allowed(self, head: bytes) -> bool:
        if self._user is None:
            return True
        pair = base64.b64encode(f"{self._user}:{self._password}".encode())
        return b"\r\nproxy-authorization: basic " + pair.lower() + b"\r\n" in head.lower()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
