"""Readers of an answer's body, into memory.

An `Exchange` reads a body of known length with a `BodyReader`, and a chunked body with a
`ChunksReader`. Both are called with the memory to fill.
"""

import socket
import struct
from contextlib import suppress

from shardcache.transport.http.http_heads import Response
from shardcache.transport.http.tls import TlsSocket

# Time limit of 0.1 s for filling a whole block of memory, as a `struct timeval`. The bytes that
# have arrived by then are written without waiting for the rest. TLS sockets have no such limit:
# `TlsSocket.fill` keeps its reads short by itself.
_TICK = struct.pack("ll", 0, 100_000)
_NO_TICK = struct.pack("ll", 0, 0)  # removes the limit
_CHUNK_BYTES = 16 * 1024


def wait_without_limit(sock: socket.socket) -> None:
    """Remove the limit that a `BodyReader` has set on reads from its socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_TICK)


class BodyReader:
    """Reads a body of known length.

    The first bytes come from the buffer through which the head was read, the others from the
    socket.

    Attributes:
        has_more: True if bytes beyond the body's end are in the buffer.
    """

    def __init__(self, response: Response, sock: socket.socket) -> None:
        # If no bytes have arrived with the head, this waits for the first ones.
        arrived_bytes = len(response.fp.peek())
        length = response.length or 0
        self._fp = response.fp
        self._buffered_bytes = min(arrived_bytes, length)  # bytes of the body in the buffer
        self.has_more = arrived_bytes > length
        self._sock = sock
        if not isinstance(sock, TlsSocket):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)

    def __call__(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the stream's end."""
        # The first bytes are returned without waiting for more, so they are reported immediately.
        if self._buffered_bytes:
            return self._read_buffered(memory)
        if isinstance(self._sock, TlsSocket):
            return self._sock.fill(memory)
        return self._receive(memory)

    def _read_buffered(self, memory: memoryview) -> int:
        """Read the buffer's bytes, and those that have arrived since; return their number."""
        count = self._fp.readinto(memory[: self._buffered_bytes])
        self._buffered_bytes -= count
        is_all = not self._buffered_bytes
        if is_all and count < len(memory) and not isinstance(self._sock, TlsSocket):
            with suppress(BlockingIOError):  # nothing more has arrived so far
                count += self._sock.recv_into(memory[count:], flags=socket.MSG_DONTWAIT)
        return count

    def _receive(self, memory: memoryview) -> int:
        """Receive until the memory is full, or `_TICK` has passed; return the number of bytes."""
        while True:
            # After `_TICK` without a byte, `recv_into` raises this error.
            with suppress(BlockingIOError):
                return self._sock.recv_into(memory, flags=socket.MSG_WAITALL)


class ChunksReader:
    """Reads a chunked body."""

    def __init__(self, response: Response) -> None:
        self._response = response

    @property
    def has_more(self) -> bool:
        """True if the body has not ended.

        Reading this property blocks until the answer is known. It may take a byte of the body, so
        the body cannot be read any further.
        """
        return bool(self._response.read(1))

    def __call__(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the body's end."""
        return self._response.readinto(memory[:_CHUNK_BYTES])
