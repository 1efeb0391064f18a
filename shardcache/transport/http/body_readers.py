"""Readers of an answer's body, into memory.

An exchange, which is one request and its answer, reads a body of known length with a `BodyReader`,
and a chunked body with a `ChunksReader`.
"""

import socket
import struct
from contextlib import suppress

from shardcache.transport.http.http_heads import Response
from shardcache.transport.http.tls import TlsSocket

# Time limit of 0.1 s for filling a whole block of memory, as a `struct timeval` of seconds and
# microseconds. The bytes that have arrived by then are written without waiting for the rest. TLS
# sockets do not need the limit: `TlsSocket.fill` keeps its reads short by itself.
_FILL_LIMIT = struct.pack("ll", 0, 100_000)
_NO_LIMIT = struct.pack("ll", 0, 0)
_MAX_READ_BYTES = 16 * 1024  # of a chunked body, at a time


def wait_without_limit(sock: socket.socket) -> None:
    """Remove the limit that a `BodyReader` has set on reads from its socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_LIMIT)


class BodyReader:
    """Reads a body of known length.

    The first bytes come from the buffer through which the head was read, the others from the
    socket.

    Attributes:
        has_more: True if bytes beyond the body's end have arrived.
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
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _FILL_LIMIT)

    def read_into(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the stream's end."""
        # The first bytes are returned without waiting for more, so they are reported immediately.
        if self._buffered_bytes:
            return self._read_buffered(memory)
        if isinstance(self._sock, TlsSocket):
            return self._sock.fill(memory)
        return self._receive(memory)

    def _read_buffered(self, memory: memoryview) -> int:
        """Read the buffer's bytes, and those that have arrived since then; return their number."""
        count = self._fp.readinto(memory[: self._buffered_bytes])
        self._buffered_bytes -= count
        rest = memory[count:]
        buffer_is_empty = not self._buffered_bytes
        if rest and buffer_is_empty and not isinstance(self._sock, TlsSocket):
            with suppress(BlockingIOError):  # nothing more has arrived so far
                count += self._sock.recv_into(rest, flags=socket.MSG_DONTWAIT)
        return count

    def _receive(self, memory: memoryview) -> int:
        """Receive until the memory is full or the limit has passed; return the number of bytes."""
        while True:
            # After `_FILL_LIMIT` without a byte, `recv_into` raises this error.
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

    def read_into(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the body's end."""
        return self._response.readinto(memory[:_MAX_READ_BYTES])
