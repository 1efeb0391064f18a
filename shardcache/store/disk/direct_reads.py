"""Reads of a file's bytes from the disk, rather than from the page cache in memory.

Verification uses them to find damage on the disk that the page cache hides.
"""

import errno
import math
import mmap
import os
from pathlib import Path


def read_direct(path: Path, offset: int, size_bytes: int) -> memoryview:
    """Return `size_bytes` of a file, or fewer at its end. Blocks. Raises OSError.

    No pages are added to the page cache or evicted from it, except on filesystems without O_DIRECT.

    Args:
        offset: a multiple of the disk's block size.
    """
    try:
        return _open_and_read(path, offset, size_bytes, flags=os.O_DIRECT)
    except OSError as exn:
        if exn.errno != errno.EINVAL:
            raise
    # The filesystem does not support O_DIRECT, or the disk's blocks are larger than the pages of
    # memory. The file is read through the page cache instead.
    return _open_and_read(path, offset, size_bytes, flags=0)


def _open_and_read(path: Path, offset: int, size_bytes: int, *, flags: int) -> memoryview:
    # O_DIRECT requires an aligned buffer of whole blocks, so more may be read than was requested.
    pages = math.ceil(size_bytes / mmap.PAGESIZE)
    buffer = mmap.mmap(-1, pages * mmap.PAGESIZE)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        got_bytes = os.preadv(fd, [buffer], offset)
    finally:
        os.close(fd)
    return memoryview(buffer)[: min(size_bytes, got_bytes)]
