"""Reading ahead in files that are read in order, and in no others."""

from collections.abc import Callable

from fsspec.caching import BaseCache

Fetcher = Callable[[int, int, int], bytes]
"""Returns the bytes from an offset to a second one, and as many of those up to a third one as can
be had without waiting for them."""


class ReadAhead(BaseCache):  # type: ignore[misc]
    """The bytes of a file that were read last, and some that follow them.

    A read that does not continue the one before gets its own bytes alone: readers of tables and of
    weights jump, and want nothing of what lies between. One that continues it gets as many more as
    have been read in a row, at most `blocksize`, so that a file read in small pieces takes few
    requests. Only what is read is waited for.
    """

    name = "shardcache"

    def __init__(self, blocksize: int, fetcher: Fetcher, size: int) -> None:
        super().__init__(blocksize, fetcher, size)
        self._start = 0  # offset of the bytes that are kept
        self._kept = b""
        self._read_to = 0  # end of the last read
        self._run_bytes = 0  # read in a row up to there

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        begin = start or 0
        end = self.size if stop is None else min(stop, self.size)
        if begin >= end:
            return b""

        follows = self._run_bytes > 0 and begin == self._read_to
        if not follows:
            self._run_bytes = 0
        self._run_bytes += end - begin
        self._read_to = end

        # 1. All of it is kept.
        kept_to = self._start + len(self._kept)
        if self._start <= begin and end <= kept_to:
            return self._kept[begin - self._start : end - self._start]

        # 2. Its beginning is kept, or nothing of it: fetch the rest, and some more if it continues
        #    the read before.
        known = b""
        if self._start <= begin < kept_to:
            known = self._kept[begin - self._start :]
        ahead_bytes = min(self._run_bytes, self.blocksize) if follows else 0
        ahead_to = min(self.size, end + ahead_bytes)
        self._kept = known + self.fetcher(begin + len(known), end, ahead_to)
        self._start = begin
        return self._kept[: end - begin]
