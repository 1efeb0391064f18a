"""Reading of a shard's file, wherever an index needs it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardcache.tarindex.members import Read


@contextmanager
def opened(path: Path) -> Iterator[tuple[Read, int]]:
    """Yield what reads a file, and its size in bytes. Blocks. Raises OSError.

    A bad sector is an error here; in a mapped file it would be a signal.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        return os.pread(fd, max_bytes, at)

    try:
        yield read, os.fstat(fd).st_size
    finally:
        os.close(fd)
