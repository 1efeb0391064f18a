"""Samples cut out of a shard on local disk, by its index; no tar is parsed here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardcache.errors import CacheDirError, CorruptShardError, SampleError
from shardcache.tarindex import TarIndex

Sample = dict[str, Any]


class ShardReader:
    """One shard, mapped. Usable as a context manager; its samples are copies and outlive it.

    Args:
        path: the tar.
        index_path: its sidecar.
        url: what samples carry as `__url__`.

    Raises:
        CacheDirError: a file is not there or may not be read, as in a container that does not see the cache.
        CorruptShardError: the sidecar is damaged or belongs to another tar.
    """

    def __init__(self, path: Path, index_path: Path, url: str) -> None:
        self.url = url
        try:
            self._index = TarIndex.open(index_path)
            self._map = _map(path, self._index.header["size_bytes"])
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=url) from exn
        except OSError as exn:
            raise CacheDirError(
                f"this process cannot read {exn.filename or path} ({exn.strerror})",
                url=url,
                remedy="in a container, mount the cache folder at the same path as the daemon has it; "
                "outside, let the user be a member of the folder's group",
            ) from exn

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
        index, tar, url = self._index, self._map, self.url
        keys = index.keys
        member_end = index.member_ends[start - 1] if start else 0
        key_end = index.key_ends[start - 1] if start else 0
        members = zip(
            map(index.extensions.__getitem__, index.extension_ids[member_end:]),
            index.starts[member_end:],
            index.ends[member_end:],
            strict=True,
        )
        ends = zip(index.member_ends[start:], index.key_ends[start:], strict=True)
        for number, (next_member_end, next_key_end) in enumerate(ends, start):
            if number in index.faults:
                raise _sample_error(index, number, url)
            sample: Sample = {"__key__": keys[key_end:next_key_end].decode("utf-8", "surrogateescape"), "__url__": url}
            for extension, first, end in islice(members, next_member_end - member_end):
                sample[extension] = tar[first:end]
            yield sample
            member_end, key_end = next_member_end, next_key_end


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found_bytes = os.fstat(fd).st_size
        if found_bytes != size_bytes:
            raise CorruptShardError(f"{path} has {found_bytes} bytes instead of {size_bytes}")
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    mapped.madvise(mmap.MADV_SEQUENTIAL)  # shards are mostly read from end to end, often from a cold disk
    return mapped


def _sample_error(index: TarIndex, number: int, url: str) -> SampleError:
    return SampleError(
        index.fault(number) or "",
        url=url,
        remedy="write the shard again, its samples' members as plain files of different extensions; "
        "until then an on_error handler can skip the sample",
    )
