"""Reading ahead in files that are read in order, and in no others.

fsspec calls a file's cache for every read. This cache is the default of the filesystem in
`filesystem`.
"""

from collections.abc import Callable

from fsspec.caching import BaseCache

Fetcher = Callable[[int, int, int], bytes]
"""Returns bytes of a file, called with three offsets: `start`, `stop` and `ahead_to`.

The bytes from `start` to `stop` are fetched. Those from `stop` to `ahead_to` follow as far as they
are there without a wait.
"""


class ReadAhead(BaseCache):  # type: ignore[misc]
    """The bytes of a file that were read last, and some that follow them.

    A read that does not continue the previous read gets its own bytes alone: readers of tables and
    of weights jump, and do not want the bytes in between. A read that continues the previous read
    gets more bytes, as many as have been read in a row, at most `blocksize`. So a file that is read
    in small pieces takes few requests. A read waits only for its own bytes.

    Args:
        blocksize: maximum number of bytes that are read ahead.
        fetcher: fetches bytes of the file.
        size: number of bytes of the file.
    """

    name = "shardcache"

    def __init__(self, blocksize: int, fetcher: Fetcher, size: int) -> None:
        super().__init__(blocksize, fetcher, size)
        self._start = 0  # offset of the bytes that are kept
        self._kept = b""
        self._read_to = 0  # end of the last read
        self._run_bytes = 0  # number of bytes read in a row up to that end

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        """Return bytes of the file; fsspec calls this, with None for the file's start or end."""
        begin = start or 0
        end = self.size if stop is None else min(stop, self.size)
        if begin >= end:
            return b""

        follows = self._run_bytes > 0 and begin == self._read_to
        if not follows:
            self._run_bytes = 0
        self._run_bytes += end - begin
        self._read_to = end

        # 1. All of the bytes are kept.
        kept_to = self._start + len(self._kept)
        if self._start <= begin and end <= kept_to:
            return self._kept[begin - self._start : end - self._start]

        # 2. Only the first bytes are kept, or none: fetch the other bytes, and some more if this
        #    read continues the previous read.
        kept_part = b""
        if self._start <= begin < kept_to:
            kept_part = self._kept[begin - self._start :]
        ahead_bytes = min(self._run_bytes, self.blocksize) if follows else 0
        ahead_to = min(self.size, end + ahead_bytes)
        self._kept = kept_part + self.fetcher(begin + len(kept_part), end, ahead_to)
        self._start = begin
        return self._kept[: end - begin]
