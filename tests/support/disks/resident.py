"""Share of a file that is in memory, by mincore(2)."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in memory, in bytes of whole pages; 0 if it does not exist.

    The kernel reports the truth only to the file's owner and to users who may write it; to others all pages appear
    resident.
    """
    # A private mapping: ctypes can take the address only of a writable buffer, and the file is read-only.
    with suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
                return _resident_pages(mapping) * mmap.PAGESIZE
    return 0


def _resident_pages(mapping: mmap.mmap) -> int:
    first_byte = ctypes.c_char.from_buffer(mapping)
    pages = ctypes.create_string_buffer(-(-len(mapping) // mmap.PAGESIZE))
    if _libc.mincore(ctypes.addressof(first_byte), len(mapping), pages) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return sum(page & 1 for page in pages.raw)
