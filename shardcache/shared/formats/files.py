"""Reading of a shard's file at any offset.

The formats use `opened` to index a shard that has arrived as a whole.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardcache.shared.tarindex.members import Read


@contextmanager
def opened(path: Path) -> Iterator[tuple[Read, int]]:
    """Yield a function that reads a file, and the file's size in bytes. Blocks. Raises OSError.

    The file is not mapped into memory, since a bad sector would then kill the process with a
    signal. As it is, a bad sector is an OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    # As a `Read` demands. The whole file is there, so `min_bytes` is of no use.
    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        return os.pread(fd, max_bytes, at)

    try:
        yield read, os.fstat(fd).st_size
    finally:
        os.close(fd)
