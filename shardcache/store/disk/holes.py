"""Holes in files: ranges that take no space on the disk, and read as zeros.

A part that is evicted leaves a hole in its file.
"""

import ctypes
import errno
import os
from collections.abc import Iterator

# Flags of fallocate(2)
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02

# Python's `os` has only posix_fallocate, which cannot punch holes.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int


def punch_hole(fd: int, start: int, size_bytes: int) -> None:
    """Free the space of a range of a file, which then reads as zeros. Blocks. Raises OSError.

    Blocks that are only partly in the range stay allocated.
    """
    if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, size_bytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def holes(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each hole in a file, in order. Blocks. Raises OSError.

    A hole may also be where zeros were written, as some filesystems store these as holes.

    Args:
        size_bytes: size of the file.
    """
    end = 0
    while end < size_bytes:
        start = os.lseek(fd, end, os.SEEK_HOLE)
        if start == size_bytes:
            return
        end = _data_start(fd, start, size_bytes)
        yield start, end


def is_hole(fd: int, start: int, end: int) -> bool:
    """Return whether all of a range is in a hole. Blocks. Raises OSError."""
    return _data_start(fd, start, end) >= end


def _data_start(fd: int, start: int, end: int) -> int:
    """Return where data begins at or after `start`; `end` if the rest of the file is a hole."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as exn:
        if exn.errno == errno.ENXIO:
            return end
        raise
