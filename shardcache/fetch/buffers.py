"""Memory that parts arrive in, used again and again: fresh pages would cost more than the copy into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Buffers:
    """As many buffers as were ever lent at the same time, until none is."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._lent = 0

    def __repr__(self) -> str:
        return f"<Buffers {self._lent} lent, {len(self._free)} free>"

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[memoryview]:
        """Lend a buffer for the block; what is in it is whatever was left there."""
        buffer = self._free.pop() if self._free else bytearray()
        if len(buffer) < size_bytes:
            buffer = bytearray(size_bytes)
        self._lent += 1
        try:
            yield memoryview(buffer)[:size_bytes]
            self._free.append(buffer)  # not after an error: a thread may still be writing it to the disk
        finally:
            self._lent -= 1
            if not self._lent:  # nothing is being fetched: the memory serves others better
                self._free.clear()
