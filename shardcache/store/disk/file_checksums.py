"""Verification of files on disk against the checksums recorded when they arrived."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardcache.checksums import crc32c


def first_damaged_piece(path: Path, piece_bytes: int, crcs: Sequence[int]) -> int | None:
    """Return the index of the first piece whose CRC32C differs, or None. Blocks; reads the whole file."""
    with open(path, "rb", buffering=0) as file:
        for number, crc in enumerate(crcs):
            if crc32c(os.pread(file.fileno(), piece_bytes, number * piece_bytes), 0) != crc:
                return number
    return None
