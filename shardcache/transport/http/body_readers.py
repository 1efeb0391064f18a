"""Readers of an answer's body, into memory."""

import select
import socket
import struct

from shardcache.transport.http.http_heads import Response
from shardcache.transport.http.tls import TlsSocket

# A `struct timeval`: the longest wait for all of a block. What has arrived until then is written.
# Not for TLS, whose reads `TlsSocket.fill` keeps short.
_TICK = struct.pack("ll", 0, 100_000)
_NO_TICK = struct.pack("ll", 0, 0)
_CHUNK_BYTES = 16 * 1024


def wait_without_limit(sock: socket.socket) -> None:
    """Remove the limit that a `BodyReader` has set on reads from its socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_TICK)


class BodyReader:
    """Reads a body of known length: first what arrived with the head, then from the socket.

    Attributes:
        has_more: True if bytes beyond the body's end arrived with the head.
    """

    def __init__(self, response: Response, sock: socket.socket) -> None:
        arrived_bytes = len(response.fp.peek())
        length = response.length or 0
        self._fp = response.fp
        self._ahead_bytes = min(arrived_bytes, length)
        self.has_more = arrived_bytes > length
        self._sock = sock
        self._flags = 0
        self._poller = select.poll()
        if not isinstance(sock, TlsSocket):
            self._poller.register(sock, select.POLLIN)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)

    def __call__(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the stream's end."""
        if self._ahead_bytes:
            count = self._fp.readinto(memory[: self._ahead_bytes])
            self._ahead_bytes -= count
            return count
        if isinstance(self._sock, TlsSocket):
            return self._sock.fill(memory)

        flags = self._flags
        self._flags = socket.MSG_WAITALL  # from now on; the first bytes are reported at once
        self._poller.poll()  # however long: from then on, each tick has some bytes
        return self._sock.recv_into(memory, flags=flags)


class ChunksReader:
    """Reads a chunked body."""

    def __init__(self, response: Response) -> None:
        self._response = response

    @property
    def has_more(self) -> bool:
        """True if the body has not ended. Blocks, and takes a byte: nothing can be read then."""
        return bool(self._response.read(1))

    def __call__(self, memory: memoryview) -> int:
        """As `BodyReader`."""
        return self._response.readinto(memory[:_CHUNK_BYTES])
