"""A server of HTTP, or of what is none: it answers with the bytes that it was given."""

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from support.programs.guard import GUARD_S
from support.stores.mischief import Ending, in_chunks

_HEAD_BYTES = 64 * 1024
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
    """A context manager that listens on a free port. The last reply is given repeatedly.

    Args:
        context: for https.
        address: of this machine, of IPv4 or IPv6; "::" for all of both.
    """

    def __init__(
        self,
        *replies: Reply | bytes,
        context: ssl.SSLContext | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self._replies = [Reply(reply) if isinstance(reply, bytes) else reply for reply in replies]
        self._context = context
        self._address = f"[{address}]" if ":" in address else address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0), family=family, dualstack_ipv6=address == "::"
        )
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
        return int(self._listener.getsockname()[1])

    async def asked(self, count: int) -> None:
        await asyncio.to_thread(self.wait_asked, count)

    def wait_asked(self, count: int) -> None:
        self._wait(lambda: len(self.heads) >= count)

    def wait_closed(self, count: int) -> None:
        self._wait(lambda: self.closed >= count)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, GUARD_S)

    def url(self, path: str = "/a.tar", host: str | None = None) -> str:
        """Return the url of a path, by the server's address or by another name of it."""
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://{host or self._address}:{self.port}{path}"

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


def answer(
    body: bytes, *headers: str, status: str = "206 Partial Content", length: int | None = None
) -> bytes:
    """Return an answer with a Content-Length, its own by default, and further headers."""
    size_bytes = len(body) if length is None else length
    return head(f"Content-Length: {size_bytes}", *headers, status=status) + body


def head(*headers: str, status: str = "206 Partial Content") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode("latin-1")


def chunked(body: bytes, *headers: str) -> bytes:
    return head("Transfer-Encoding: chunked", *headers) + in_chunks(body)
