"""Page cache control: read files ahead, drop their pages. All functions block: use a thread.

The kernel keeps pages that were read while it has memory, and knows only past accesses. These calls tell it about
future ones. They are advisory: nothing depends on them, and a missing file is not an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardcache.store.disk.files import disk_errors

# One call reads at most the device's read-ahead (read_ahead_kb, at least 128 in any usual setup) and silently ignores
# the rest. Steps over resident pages cost next to nothing.
_STEP_BYTES = 128 * 1024


def read_ahead(path: Path) -> None:
    """Start reading the whole file into the page cache; return once all of it is requested. Raises DiskError."""
    with disk_errors(path), suppress(FileNotFoundError), _opened(path) as fd:
        for offset in range(0, os.fstat(fd).st_size, _STEP_BYTES):
            os.posix_fadvise(fd, offset, _STEP_BYTES, os.POSIX_FADV_WILLNEED)


def let_go(path: Path) -> None:
    """Drop the file's pages, except those that a process has mapped and touched. Raises DiskError.

    Dirty pages also stay; a published shard has none.
    """
    with disk_errors(path), suppress(FileNotFoundError), _opened(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
