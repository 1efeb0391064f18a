"""Streams of bytes that are made piece by piece.

`Format.stored_copy` returns such a stream, which the cache reads and stores.
"""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

_BUFFER_BYTES = 1024 * 1024


def stream_of(pieces: Iterator[bytes]) -> BinaryIO:
    """Return a stream of the pieces that an iterator yields.

    Reading from the stream raises what the iterator raises.
    """
    return io.BufferedReader(_Pieces(pieces), _BUFFER_BYTES)


class _Pieces(io.RawIOBase):
    """The raw stream: each read returns some or all of a piece."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces = pieces
        self._unread = memoryview(b"")  # the rest of the current piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unread:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._unread = memoryview(piece)
        count = min(len(buffer), len(self._unread))
        buffer[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count
