"""Shards on local disk: published ones, read by their index, and ones that are still arriving, from the beginning."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardcache.errors import CorruptShardError
from shardcache.protocol import Arriving
from shardcache.tarindex.grouping import Adjacency, Grouping, split_lines
from shardcache.tarindex.members import Member, Tar
from shardcache.tarindex.tables import TarIndex
from shardcache_client import files
from shardcache_client.files import WHOLE, BlockCutter, Column, Run, Sample, View

if TYPE_CHECKING:  # imports numpy
    from shardcache_client.sharing.handover import Handover


class MappedShard:
    """One whole shard, read by its index. Its samples outlive it.

    Without a handover, all values are bytes. With an `inode`, that of the tar, it is not published
    yet: other processes would not find it at this path.

    Raises TokensError if the view is of blocks of tokens, and the shard has none; ShardGoneError if a file does not
    exist, CacheDirError if it may not be read, CorruptShardError if the sidecar is damaged or of another tar.
    """

    def __init__(
        self,
        path: Path,
        index_path: Path,
        url: str,
        *,
        inode: int | None = None,
        in_order: bool = True,
        handover: Handover | None = None,
        view: View = WHOLE,
    ) -> None:
        self.path = path
        self.url = url
        self._view = view
        self._blocks: BlockCutter | None = None
        try:
            with ExitStack() as opened:  # closes what was opened if anything fails
                self.index = opened.enter_context(closing(TarIndex.open(index_path)))
                if self.index.header.get("samples", 0) is None:  # evicted, and fetched again as a plain file
                    raise FileNotFoundError(errno.ENOENT, "the shard is not indexed", str(path))
                size_bytes = self.index.header["size_bytes"]
                mapped = files.map_file(path, size_bytes, inode, in_order=in_order)
                self.tar = opened.enter_context(closing(mapped))
                if view.blocks is not None:
                    self._blocks = BlockCutter(view.blocks, self.index, self.tar, url)
                self._samples = len(self.index if self._blocks is None else self._blocks)
                named = None if files.is_nameless(path) or inode is not None else path
                self._loan = handover.lend(self.tar, named, path.stat().st_ino, url) if handover is not None else None
                opened.pop_all()
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=url) from exn
        except OSError as exn:
            raise files.unreadable(exn, path, url) from exn

    def __repr__(self) -> str:
        return f"MappedShard({self.url!r}, samples={len(self)}, closed={self.tar.closed})"

    def __len__(self) -> int:
        return self._samples

    def close(self) -> None:
        """Unmap the shard, with a handover once no value is left. Iterators over it raise ValueError from here on."""
        self.index.close()
        if self._loan is None:
            self.tar.close()

    @property
    def settled(self) -> bool:
        """True if no other process has yet to map the file. Valid once no more samples will be sliced."""
        return self._loan is None or self._loan.settled()

    @property
    def _columns(self) -> list[Column | None]:
        loan, index = self._loan, self.index
        columns = files.as_bytes(index.extensions, self.tar) if loan is None else loan.columns(index)
        return files.chosen(columns, self._view.reads, self._view.prefix)

    def cutter(self) -> Callable[..., Sample]:
        """Return a function that returns any sample by its number; see `files.cutter`."""
        return self._blocks or files.cutter(self.index, self._columns, self.url)

    def runs(self, places: Sequence[int | None]) -> list[Run] | None:
        """Return where the members of samples are; see `files.runs_of`."""
        return files.runs_of(self.index, self._columns, places)

    def samples(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """Yield each sample from `start` on (up to `stop`): `{"__key__": str, "__url__": str, extension: bytes…}`.

        Raises SampleError in place of a bad sample. That ends the iterator, as any exception does; continue with
        `samples(n + 1)`, where n is the number of the bad sample.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        if self._blocks is not None:
            return map(self._blocks, range(start, stop))
        return files.cut(self.index, self._columns, self.url, start, stop)


More = Callable[[int], Arriving | None]
"""`more(beyond)` waits until more than the first `beyond` bytes of the shard have arrived, and returns the new grant;
None if the rest must be read another way, or this file must not be read on. Raises the error that stops the rest."""


class _EndOfPartError(Exception):
    """Nothing more can be read from this file."""


def _closed(_beyond: int) -> NoReturn:
    raise ValueError("the shard is closed")


class ArrivingShard:
    """The samples of a shard as far as it has arrived. Used like a `MappedShard`, with the same sample numbers.

    The file has its final size from the start, so it is mapped once; bytes that have not arrived would read as zeros,
    and are never accessed. Renaming the file on publication does not affect the map.

    A sample is yielded once the header after its last member has arrived. The last sample is always left to the index:
    only the end of the tar shows that it is whole, and the daemon checks that end.

    Raises ShardGoneError if the file was published or given up, CacheDirError if it may not be read, CorruptShardError
    if its size differs from the shard's.
    """

    def __init__(self, grant: Arriving, more: More, last: int | None = None, view: View = WHOLE) -> None:
        self.url = grant["url"]
        self._view = view
        self._more = more
        self._last = last  # number of the last sample according to the manifest, not yielded here; None if unknown
        self._ready_bytes = grant["ready_bytes"]
        self._size_bytes = grant["size_bytes"]
        path = Path(grant["path"])
        try:
            self._map = files.map_file(path, self._size_bytes, grant["inode"])
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=self.url) from exn
        except OSError as exn:
            raise files.unreadable(exn, path, self.url) from exn
        self._grouping = Grouping()
        self._adjacency = Adjacency(self._grouping.samples)
        self._columns: list[Column | None] = []
        # The daemon checks the end of the tar once the whole shard has arrived.
        tar = Tar(self._read, self._size_bytes, self.url, require_end=False, ignore_trailing_data=True)
        self._members: Iterator[Member] = split_lines(tar, self._read, self.url)

    def __repr__(self) -> str:
        ready = f"{self._ready_bytes} of {self._size_bytes} bytes"
        return f"ArrivingShard({self.url!r}, {ready}, samples={self._grouping.whole}, closed={self._map.closed})"

    def close(self) -> None:
        """Unmap the file. Iterators over the shard raise ValueError from here on."""
        self._map.close()
        # The walk refers to this object, and `more` to its reader's session: this cycle would keep the session alive
        # until the garbage collector runs.
        self._members, self._more = iter(()), _closed

    def samples(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """Yield samples as `MappedShard` does, each as soon as it has arrived, until the rest must be read another way.

        Raises NotATarError, TruncatedShardError, CorruptShardError for bytes that are no valid tar; TornSampleError at
        the second part of a sample, whose first may have been yielded; what `more` raises.
        """
        for number in count(start) if stop is None else range(start, stop):
            if not self._is_whole(number):
                return
            tables = self._grouping.samples
            new = tables.extensions[len(self._columns) :]
            self._columns += files.chosen(files.as_bytes(new, self._map), self._view.reads, self._view.prefix)
            yield from files.cut(tables, self._columns, self.url, number, number + 1)

    def _is_whole(self, number: int) -> bool:
        """Wait until a sample has arrived; return False if it must be read another way."""
        try:
            if number == self._last:
                self._wait_beyond(self._size_bytes)
            while self._grouping.whole <= number:
                if (member := next(self._members, None)) is not None:
                    self._grouping.add((member,))
                    self._adjacency.check(self.url)
                else:
                    self._wait_beyond(self._size_bytes)
        except _EndOfPartError:
            return False
        return True

    def _read(self, at: int, min_bytes: int, max_bytes: int) -> bytes:
        """Return bytes for the walk over the tar, waiting until they have arrived."""
        needed_bytes = min(at + min_bytes, self._size_bytes)
        while self._ready_bytes < needed_bytes:
            self._wait_beyond(needed_bytes - 1)
        return self._map[at : min(at + max_bytes, self._ready_bytes)]

    def _wait_beyond(self, beyond: int) -> None:
        grant = self._more(beyond)
        if grant is None:
            raise _EndOfPartError
        self._ready_bytes = grant["ready_bytes"]
