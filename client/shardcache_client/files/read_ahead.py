"""A cache for fsspec's files that reads ahead only in files that are read in order.

fsspec calls the cache of a file for every read. `ReadAhead` is the default for the files of
`filesystem.ShardcacheFileSystem`.
"""

from collections.abc import Callable

from fsspec.caching import BaseCache

Fetcher = Callable[[int, int, int], bytes]
"""Returns bytes of a file, called with three offsets: `start`, `stop` and `ahead_to`.

The bytes from `start` to `stop` are fetched. Those from `stop` to `ahead_to` are added as far as
they are available without a wait.
"""


class ReadAhead(BaseCache):  # type: ignore[misc]
    """The bytes of a file that were read last, and some that follow them.

    A read that does not continue the previous read fetches only its own bytes: readers of tables
    and weights jump, and do not need the bytes in between. A read that continues the previous read
    also fetches as many further bytes as have been read in a row, at most `blocksize`. So a file
    that is read in small pieces takes few requests. A read waits only for its own bytes.

    Args:
        blocksize: maximum number of bytes that are read ahead.
        fetcher: fetches bytes of the file.
        size: number of bytes of the file.
    """

    name = "shardcache"

    def __init__(self, blocksize: int, fetcher: Fetcher, size: int) -> None:
        super().__init__(blocksize, fetcher, size)
        self._kept = b""
        self._start = 0  # offset of `_kept` in the file
        self._read_to = 0  # end of the previous read
        self._run_bytes = 0  # number of bytes read in a row up to that end

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        """Return bytes of the file; fsspec calls this, with None for the file's start or end."""
        begin = start or 0
        end = self.size if stop is None else min(stop, self.size)
        if begin >= end:
            return b""

        continues = self._run_bytes > 0 and begin == self._read_to
        if not continues:
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
        ahead_bytes = min(self._run_bytes, self.blocksize) if continues else 0
        ahead_to = min(self.size, end + ahead_bytes)
        self._kept = kept_part + self.fetcher(begin + len(kept_part), end, ahead_to)
        self._start = begin
        return self._kept[: end - begin]
