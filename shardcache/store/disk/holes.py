"""Holes in files: ranges that take no space on the disk, and read as zeros.

A part that is evicted leaves a hole in its file.
"""

import ctypes
import os

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
