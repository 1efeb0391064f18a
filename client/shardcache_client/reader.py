"""A published shard on local disk, and its samples by its index."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from shardcache.errors import CacheDirError, CorruptShardError
from shardcache.tarindex import TarIndex
from shardcache_client.cutting import Sample, cut


class ShardGoneError(CacheDirError):
    """A file that the daemon named is not there: it was let go again, or this process cannot see the cache."""

    code = "shard_gone"


class ShardReader:
    """One shard, mapped. Usable as a context manager; its samples are copies and outlive it.

    Args:
        path: the tar.
        index_path: its sidecar.
        url: what samples carry as `__url__`.

    Raises:
        ShardGoneError: a file is not there.
        CacheDirError: a file may not be read.
        CorruptShardError: the sidecar is damaged or belongs to another tar.
    """

    def __init__(self, path: Path, index_path: Path, url: str) -> None:
        self.url = url
        try:
            self._index = TarIndex.open(index_path)
            self._map = map_file(path, self._index.header["size_bytes"])
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=url) from exn
        except OSError as exn:
            raise unreadable(exn, path, url) from exn

    def __repr__(self) -> str:
        return f"ShardReader({self.url!r}, samples={len(self)}, closed={self._map.closed})"

    def __len__(self) -> int:
        return len(self._index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the map back. Iterators over the shard end in ValueError from here on."""
        self._map.close()

    def __iter__(self) -> Iterator[Sample]:
        return self.samples()

    def sample(self, number: int) -> Sample:
        """Return one sample as `samples` gives it; IndexError outside the shard."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of a shard with {len(self)} samples")
        return next(self.samples(number))

    def samples(self, start: int = 0) -> Iterator[Sample]:
        """Yield each sample from `start` on: `{"__key__": str, "__url__": str, extension: bytes…}`.

        Raises SampleError in place of a bad sample. That ends the iterator, as any exception does: who wants the
        others goes on with `samples(n + 1)`, where n is the number of the bad one.
        """
        return cut(self._index, self._map, self.url, start, len(self))


def map_file(path: Path, size_bytes: int, inode: int | None = None) -> mmap.mmap:
    """Map a file for reading, if it is the one with that inode, where one is given.

    Raises CorruptShardError when it has another size, OSError when it cannot be read or is another.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        if inode not in (None, stat.st_ino):
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", str(path))
        if stat.st_size != size_bytes:
            raise CorruptShardError(f"{path} has {stat.st_size} bytes instead of {size_bytes}")
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    mapped.madvise(mmap.MADV_SEQUENTIAL)  # shards are mostly read from end to end, often from a cold disk
    return mapped


def unreadable(exn: OSError, path: Path, url: str) -> CacheDirError:
    """Return what is to be raised for a file in the cache that cannot be opened or mapped."""
    kind = ShardGoneError if isinstance(exn, FileNotFoundError) else CacheDirError
    return kind(
        f"this process cannot read {exn.filename or path} ({exn.strerror})",
        url=url,
        remedy="in a container, mount the cache folder at the same path as the daemon has it; "
        "outside, let the user be a member of the folder's group",
    )
