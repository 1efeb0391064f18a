"""The beginning of a shard that is still arriving, read while the rest is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from shardcache.errors import CorruptShardError
from shardcache.protocol import Arriving
from shardcache.tarindex import Grouping, Tar
from shardcache.tarindex.members import Member
from shardcache_client.reading.cutting import Column, Sample, as_bytes, cut
from shardcache_client.reading.reader import map_file, unreadable

More = Callable[[int], Arriving | None]
"""`more(beyond)` waits until more than the first `beyond` bytes of the shard are there, and returns the grant that says
so; None when there is another way to the rest, or the file may not be read on. Raises why the rest does not come."""


class _EndOfPartError(Exception):
    """Nothing more is to be read from here."""


def _closed(_beyond: int) -> NoReturn:
    raise ValueError("the shard is closed")


class ArrivingShard:
    """The samples of a shard as far as it is there. Used as a `ShardReader`; numbers samples as that does.

    The file has its final size from the beginning, so that it can be mapped once; what has not arrived reads as zeros,
    and is never looked at. Renaming the file when it is published leaves the map as it is.

    A sample is given once the header behind its last member has arrived. Of the last one, only the end of the tar
    could tell that it is whole, and a tar's end is judged by the daemon: it is always left to the index.

    Args:
        grant: what the daemon said of the shard.
        more: asks for more of it.
        last: number of the sample that is said to be its last; only the whole shard can tell, so it is not given here.

    Raises:
        ShardGoneError: the file is not there, published meanwhile or given up.
        CacheDirError: it may not be read.
        CorruptShardError: it has another size than the shard.
    """

    def __init__(self, grant: Arriving, more: More, last: int | None = None) -> None:
        self.url = grant["url"]
        self._more = more
        self._last = last
        self._ready_bytes = grant["ready_bytes"]
        self._size_bytes = grant["size_bytes"]
        path = Path(grant["path"])
        try:
            self._map = map_file(path, self._size_bytes, grant["inode"])
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=self.url) from exn
        except OSError as exn:
            raise unreadable(exn, path, self.url) from exn
        self._grouping = Grouping()
        self._columns: list[Column] = []
        # The daemon judges the end of the tar, once it has the whole.
        tar = Tar(self._read, self._size_bytes, self.url, require_end=False, ignore_trailing_data=True)
        self._members: Iterator[Member] = iter(tar)

    def __repr__(self) -> str:
        ready = f"{self._ready_bytes} of {self._size_bytes} bytes"
        return f"ArrivingShard({self.url!r}, {ready}, samples={self._grouping.whole}, closed={self._map.closed})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the map back. Iterators over the shard end in ValueError from here on."""
        self._map.close()
        # The walk refers to this object, and `more` to its reader's session: a circle would keep that until the garbage
        # collector comes.
        self._members, self._more = iter(()), _closed

    def samples(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """Yield samples from number `start` on, each as soon as it has arrived, until there is another way to the rest,
        or `stop` is reached.

        Raises SampleError in place of a bad sample, as `ShardReader.samples` does; NotATarError, TruncatedShardError or
        CorruptShardError when what has arrived is no sound tar; and what `more` raises.
        """
        for number in count(start) if stop is None else range(start, stop):
            if not self._is_whole(number):
                return
            tables = self._grouping.samples
            self._columns += as_bytes(tables.extensions[len(self._columns) :], self._map)
            yield from cut(tables, self._columns, self.url, number, number + 1)

    def _is_whole(self, number: int) -> bool:
        """Wait until a sample has arrived; False when it is to be had elsewhere."""
        try:
            if number == self._last:
                self._wait_beyond(self._size_bytes)
            while self._grouping.whole <= number:
                self._walk_on()
        except _EndOfPartError:
            return False
        return True

    def _walk_on(self) -> None:
        member = next(self._members, None)
        if member is None:
            self._wait_beyond(self._size_bytes)
        else:
            self._grouping.add((member,))

    def _read(self, at: int, least_bytes: int, most_bytes: int) -> bytes:
        """Give the walk what is there, and nothing that is not."""
        needed_bytes = min(at + least_bytes, self._size_bytes)
        while self._ready_bytes < needed_bytes:
            self._wait_beyond(needed_bytes - 1)
        return self._map[at : min(at + most_bytes, self._ready_bytes)]

    def _wait_beyond(self, beyond: int) -> None:
        grant = self._more(beyond)
        if grant is None:
            raise _EndOfPartError
        self._ready_bytes = grant["ready_bytes"]
