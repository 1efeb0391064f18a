"""Streams of bytes that are made piece by piece."""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

_BUFFER_BYTES = 1024 * 1024


def stream_of(pieces: Iterator[bytes]) -> BinaryIO:
    """Return the stream of what an iterator yields. Reading raises what that raises."""
    return io.BufferedReader(_Pieces(pieces), _BUFFER_BYTES)


class _Pieces(io.RawIOBase):
    """The raw stream: each read returns some or all of a piece."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
