"""A proxy that passes requests on, plainly or through tunnels, if it is given the right credentials."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Self
from urllib.parse import quote, urlsplit

_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 64 * 1024


class ForwardProxy:
    """Listens on a free port of 127.0.0.1; use it as `async with`."""

    def __init__(self, user: str, password: str) -> None:
        self._user, self._password = user, password
        self._clients: set[asyncio.StreamWriter] = set()
        self.targets: list[str] = []  # that a connection was made for, a url or, by CONNECT, host and port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._clients):
            writer.transport.abort()
        await self._server.wait_closed()

    def url(self, password: str) -> str:
        """Return its url, with a password."""
        return f"http://{quote(self._user)}:{quote(password, '')}@127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._pass_on(reader, writer)
        self._clients.discard(writer)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, *_ = head.decode("latin-1").split()
        pair = base64.b64encode(f"{self._user}:{self._password}".encode())
        if b"\r\nproxy-authorization: basic " + pair.lower() + b"\r\n" not in head.lower():
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


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
