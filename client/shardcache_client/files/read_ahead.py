"""Bytes of a file that are read ahead only if the file is read in order.

The files of `open_cached` and of fsspec's filesystem read through `ReadAhead`.
"""

from collections.abc import Callable

Fetch = Callable[[int, int, int], bytes]
"""Returns bytes of a file, called with three offsets: `start`, `stop` and `ahead_to`.

The bytes from `start` to `stop` are fetched. Those from `stop` to `ahead_to` are added as far as
they are available without a wait.
"""

DEFAULT_BLOCK_BYTES = 5 * 1024 * 1024
"""Default for the maximum number of bytes that are read ahead."""


class ReadAhead:
    """The bytes of a file that were read last, and some that follow them. Not thread-safe.

    A read that does not continue the previous read fetches only its own bytes: readers of tables
    and weights jump, and do not need the bytes in between. A read that continues the previous read
    also fetches as many further bytes as have been read in a row, at most `block_bytes`. So a file
    that is read in small pieces takes few requests. A read waits only for its own bytes.

    Args:
        block_bytes: maximum number of bytes that are read ahead.
        fetch: fetches bytes of the file.
        size_bytes: size of the file.
    """

    def __init__(self, block_bytes: int, fetch: Fetch, size_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._fetch = fetch
        self._size_bytes = size_bytes
        self._kept = b""
        self._start = 0  # offset of `_kept` in the file
        self._read_to = 0  # end of the previous read
        self._run_bytes = 0  # number of bytes read in a row up to that end

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, or up to the end of the file.

        They are not copied, as a read of tensors may have gigabytes.
        """
        stop = min(stop, self._size_bytes)
        if start >= stop:
            return memoryview(b"")

        continues = self._run_bytes > 0 and start == self._read_to
        if not continues:
            self._run_bytes = 0
        self._run_bytes += stop - start
        self._read_to = stop

        # 1. All of the bytes are kept.
        kept_to = self._start + len(self._kept)
        if self._start <= start and stop <= kept_to:
            return memoryview(self._kept)[start - self._start : stop - self._start]

        # 2. Only the first bytes are kept, or none: fetch the other bytes, and some more if this
        #    read continues the previous read.
        kept_part = b""
        if self._start <= start < kept_to:
            kept_part = self._kept[start - self._start :]
        ahead_bytes = min(self._run_bytes, self._block_bytes) if continues else 0
        ahead_to = min(self._size_bytes, stop + ahead_bytes)
        data = kept_part + self._fetch(start + len(kept_part), stop, ahead_to)
        # The end of a large read, too, is in the next one's reach. Its beginning only takes memory.
        passed_bytes = max(0, stop - start - self._block_bytes)
        self._kept = data[passed_bytes:]
        self._start = start + passed_bytes
        return memoryview(data)[: stop - start]
