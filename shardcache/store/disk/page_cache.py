"""Page cache control: read files ahead, drop their pages, count resident pages. All functions block: use a thread.

The kernel keeps pages that were read while it has memory, and knows only past accesses. These calls tell it about
future ones. They are advisory: nothing depends on them, and a missing file is not an error.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardcache.store.disk.files import disk_errors

# One call reads at most the device's read-ahead (read_ahead_kb, at least 128 in any usual setup) and silently ignores
# the rest. Steps over resident pages cost next to nothing.
_STEP_BYTES = 128 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


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


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in memory, in bytes of whole pages; 0 if it does not exist. Raises DiskError.

    The kernel reports the truth only to the file's owner and to users who may write it; to others all pages appear
    resident (mincore(2)).
    """
    with disk_errors(path), suppress(FileNotFoundError), _opened(path) as fd:
        if os.fstat(fd).st_size:
            # A private mapping: ctypes can take the address only of a writable buffer, and the file is read-only.
            with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as mapping:
                return _resident_pages(mapping) * mmap.PAGESIZE
    return 0


def _resident_pages(mapping: mmap.mmap) -> int:
    first_byte = ctypes.c_char.from_buffer(mapping)
    pages = ctypes.create_string_buffer(-(-len(mapping) // mmap.PAGESIZE))
    if _libc.mincore(ctypes.addressof(first_byte), len(mapping), pages) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return sum(page & 1 for page in pages.raw)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
