"""Reading of a published shard on local disk, by its index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shardcache.errors import CorruptShardError
from shardcache.tarindex import TarIndex
from shardcache_client.files.blocks import WHOLE, BlockCutter, TokenBlocks, View
from shardcache_client.files.slicing import (
    Column,
    Sample,
    as_bytes,
    chosen,
    cut,
    cutter,
    is_nameless,
    map_file,
    unreadable,
)

if TYPE_CHECKING:  # imports numpy
    from shardcache_client.sharing.handover import Handover


class MappedShard:
    """One mapped shard. Usable as a context manager; its samples outlive it.

    Args:
        path: the tar.
        index_path: its sidecar.
        url: the samples' `__url__`.
        in_order: True if most of it will be read in file order.
        handover: passes samples to other processes without a copy; with None, all values are bytes, not only small
            ones.
        view: form in which samples are read.

    Raises:
        TokensError: the view is of blocks of tokens, and the shard has none.
        ShardGoneError: a file does not exist.
        CacheDirError: a file may not be read.
        CorruptShardError: the sidecar is damaged or belongs to another tar.
    """

    def __init__(
        self,
        path: Path,
        index_path: Path,
        url: str,
        *,
        in_order: bool = True,
        handover: Handover | None = None,
        view: View = WHOLE,
    ) -> None:
        self.path = path
        self.url = url
        self._view = view
        self._blocks: BlockCutter | None = None
        try:
            self.index = TarIndex.open(index_path)
            try:
                self.tar = map_file(path, self.index.header["size_bytes"], in_order=in_order)
            except BaseException:
                self.index.close()
                raise
            if view.blocks is not None:
                self._blocks = self._cut_blocks(view.blocks)
            self._samples = len(self.index if self._blocks is None else self._blocks)
            named = None if is_nameless(path) else path
            self._loan = handover.lend(self.tar, named, path.stat().st_ino, url) if handover is not None else None
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=url) from exn
        except OSError as exn:
            raise unreadable(exn, path, url) from exn

    def __repr__(self) -> str:
        return f"MappedShard({self.url!r}, samples={len(self)}, closed={self.tar.closed})"

    def __len__(self) -> int:
        return self._samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the shard. Iterators over it raise ValueError from here on.

        With a handover, it stays mapped until the last value sliced from it is gone.
        """
        self.index.close()
        if self._loan is None:
            self.tar.close()

    @property
    def settled(self) -> bool:
        """True if no other process has yet to map the file. Valid once no more samples will be sliced."""
        return self._loan is None or self._loan.settled()

    def _cut_blocks(self, blocks: TokenBlocks) -> BlockCutter:
        try:
            return BlockCutter(blocks, self.index, self.tar, self.url)
        except BaseException:
            self.index.close()
            self.tar.close()
            raise

    @property
    def _columns(self) -> list[Column | None]:
        loan, index = self._loan, self.index
        return chosen(as_bytes(index.extensions, self.tar) if loan is None else loan.columns(index), self._view.reads)

    def __iter__(self) -> Iterator[Sample]:
        return self.samples()

    def sample(self, number: int) -> Sample:
        """Return one sample, as from `samples`. Raises IndexError if the number is out of range."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of a shard with {len(self)} samples")
        return next(self.samples(number))

    def cutter(self) -> Callable[[int], Sample]:
        """Return a function that returns any sample by its number; it raises SampleError for a bad one."""
        return self._blocks or cutter(self.index, self._columns, self.url)

    def samples(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """Yield each sample from `start` on (up to `stop`): `{"__key__": str, "__url__": str, extension: bytes…}`.

        Raises SampleError in place of a bad sample. That ends the iterator, as any exception does; continue with
        `samples(n + 1)`, where n is the number of the bad sample.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        if self._blocks is not None:
            return map(self._blocks, range(start, stop))
        return cut(self.index, self._columns, self.url, start, stop)
