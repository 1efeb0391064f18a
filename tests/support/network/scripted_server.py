"""Servers of HTTP, or of what is none: one answers with the bytes that it was given, one is a proxy."""

import asyncio
import base64
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, urlsplit

from support.stores.mischief import Ending

_LIMIT_S = 60.0
_HEAD_BYTES = 64 * 1024
# The head of a TLS record of 16 KiB of ciphertext, and less of it than that.
_HALF_A_RECORD = b"\x17\x03\x03\x40\x00" + bytes(100)
_LINGER = struct.pack("ii", 1, 0)  # close by a reset


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to one request, and the end of its connection.

    Attributes:
        then: called with the connection's plain socket after the data were sent.
    """

    data: bytes
    ending: Ending = Ending.STAY
    then: Callable[[socket.socket], object] | None = None


class ScriptedServer:
    """Listens on a free port of an address; a context manager. The last reply is given again and again.

    Args:
        context: for https.
        address: of this machine, of IPv4 or IPv6.
    """

    def __init__(
        self, *replies: Reply | bytes, context: ssl.SSLContext | None = None, address: str = "127.0.0.1"
    ) -> None:
        self._replies = [Reply(reply) if isinstance(reply, bytes) else reply for reply in replies]
        self._context = context
        self._address = f"[{address}]" if ":" in address else address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        self.connections = 0  # number of connections
        self.heads: list[str] = []  # of all requests, as they came
        self.closed = 0  # how many of the connections are no more

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    async def asked(self, count: int) -> None:
        """Wait until there were so many requests."""
        await asyncio.to_thread(self.wait_asked, count)

    def wait_asked(self, count: int) -> None:
        """As `asked`, but blocks."""
        self._wait(lambda: len(self.heads) >= count)

    def wait_closed(self, count: int) -> None:
        """Wait until so many connections are closed. Blocks."""
        self._wait(lambda: self.closed >= count)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, _LIMIT_S)

    def url(self, path: str = "/a.tar", host: str | None = None) -> str:
        """Return the url of a path, by the server's address or by another name of it."""
        return f"{'http' if self._context is None else 'https'}://{host or self._address}:{self.port}{path}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        plain = sock.dup()
        self._open.add(plain)
        with plain, contextlib.suppress(OSError), self._encrypted(sock) as stream:
            while self._answer(stream, plain):
                pass
        self._open.discard(plain)
        with self._changed:
            self.closed += 1
            self._changed.notify_all()

    def _encrypted(self, sock: socket.socket) -> socket.socket:
        return sock if self._context is None else self._context.wrap_socket(sock, server_side=True)

    def reply(self, head: str, number: int) -> Reply:
        """Return what is sent to a request, the first of which has number 0."""
        return self._replies[min(number, len(self._replies) - 1)]

    def _answer(self, stream: socket.socket, plain: socket.socket) -> bool:
        """Answer a request; return whether there may be another."""
        head = b""
        while b"\r\n\r\n" not in head:
            data = stream.recv(_HEAD_BYTES)
            if not data:
                return False
            head += data
        with self._changed:
            number = len(self.heads)
            self.heads.append(head.decode("latin-1"))
            self._changed.notify_all()
        reply = self.reply(head.decode("latin-1"), number)
        stream.sendall(reply.data)
        if reply.then is not None:
            reply.then(plain)
        if reply.ending is Ending.RESET:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        if reply.ending is Ending.HANG:
            while plain.recv(_HEAD_BYTES):
                pass
        return reply.ending is Ending.STAY


def answer(body: bytes, *headers: str, status: str = "206 Partial Content", length: int | None = None) -> bytes:
    """Return an answer with a Content-Length, its own by default, and further headers."""
    size_bytes = len(body) if length is None else length
    return head(f"Content-Length: {size_bytes}", *headers, status=status) + body


def head(*headers: str, status: str = "206 Partial Content") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


def chunked(body: bytes, *headers: str, chunk_bytes: int = 10_000) -> bytes:
    """Return an answer whose body comes in chunks."""
    pieces = [body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    return head("Transfer-Encoding: chunked", *headers) + chunks


def cut_record(plain: socket.socket) -> None:
    """Send the beginning of a TLS record; for `Reply.then`, before the connection is closed."""
    plain.sendall(_HALF_A_RECORD)


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
