"""What of a file lies in memory: bring it in, let it go, look. All of them block: call them in a thread.

The kernel keeps what was read for as long as it has room, and knows only the past. These calls tell it the future.
They are advice: nothing depends on it, and a file that has gone meanwhile is no error.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardcache.store.files import disk_errors

# One call reads no more than the device reads ahead (read_ahead_kb, at least 128 in any usual set-up) and leaves out
# the rest without a word. Steps over what is in memory already cost next to nothing.
_STEP_BYTES = 128 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def read_ahead(path: Path) -> None:
    """Have the disk bring the whole file into memory; returns when all of it is asked for. Raises CacheDirError."""
    with disk_errors(path), suppress(FileNotFoundError), _opened(path) as fd:
        for offset in range(0, os.fstat(fd).st_size, _STEP_BYTES):
            os.posix_fadvise(fd, offset, _STEP_BYTES, os.POSIX_FADV_WILLNEED)


def let_go(path: Path) -> None:
    """Give the file's memory back, but for pages that a process has mapped and touched. Raises CacheDirError.

    Pages that are still to be written to the disk stay as well; a published shard has none.
    """
    with disk_errors(path), suppress(FileNotFoundError), _opened(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(path: Path) -> int:
    """Return how much of a file lies in memory, in whole pages; 0 where there is no file. Raises CacheDirError.

    The kernel tells only who owns the file or may write it: to others all of it seems to be there (mincore(2)).
    """
    with disk_errors(path), suppress(FileNotFoundError), _opened(path) as fd:
        if os.fstat(fd).st_size:
            # A private mapping: ctypes takes the address of a writable one alone, and the file is read-only.
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
