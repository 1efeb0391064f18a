"""Verification of a published shard in small steps, reading the disk itself, against the checksums from its arrival.

O_DIRECT bypasses the page cache: it reads what is on the disk rather than what is in memory, and neither fills the page
cache with unneeded pages nor evicts needed ones.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from shardcache import tarindex
from shardcache.checksums import crc32c
from shardcache.errors import CorruptShardError
from shardcache.store.disk.files import damage_errors
from shardcache.store.folder.layout import Layout
from shardcache.store.shard import Facts

BLOCK_BYTES = 1024 * 1024


class Scrub:
    """The verification of one shard, in steps that each block for the time of one block's read.

    The file is open only during a step, so that the shard can be evicted between steps.
    """

    def __init__(self, layout: Layout, key: str, facts: Facts) -> None:
        self.read_bytes = 0
        self._tar = layout.tar(key)
        self._sidecar = layout.sidecar(key)
        self._facts = facts
        self._crc = 0

    def step(self) -> int:
        """Verify the next block and return its size in bytes; 0 after the last.

        Raises CorruptShardError if the sidecar, or a piece that this step completes, is damaged or unreadable;
        FileNotFoundError if the shard is gone; ExhaustedError.
        """
        wanted_bytes = self._block_bytes()
        if not wanted_bytes:
            return 0
        with damage_errors(self._tar, self._facts.url):
            if not self.read_bytes:
                tarindex.TarIndex.open(self._sidecar).close()
            block = _read(self._tar, self.read_bytes, wanted_bytes)
        if len(block) < wanted_bytes:
            raise self._damaged(f"ends at byte {self.read_bytes + len(block)}")
        self._crc = crc32c(block, self._crc)
        self.read_bytes += wanted_bytes
        self._check_piece()
        return wanted_bytes

    def _check_piece(self) -> None:
        number, rest_bytes = divmod(self.read_bytes, self._facts.part_bytes)
        if rest_bytes and self.read_bytes < self._facts.size_bytes:
            return  # the piece is not complete yet
        if self._crc != self._facts.part_crcs[number if rest_bytes else number - 1]:
            raise self._damaged(f"is damaged before byte {self.read_bytes}")
        self._crc = 0

    def _block_bytes(self) -> int:
        """Return the size of the next block, which never crosses the end of a piece."""
        left_bytes = self._facts.part_bytes - self.read_bytes % self._facts.part_bytes
        return min(BLOCK_BYTES, left_bytes, self._facts.size_bytes - self.read_bytes)

    def _damaged(self, what: str) -> CorruptShardError:
        return CorruptShardError(f"the cached file {self._tar} {what}", url=self._facts.url)


def _read(path: Path, offset: int, size_bytes: int) -> memoryview:
    """Return `size_bytes` of a file, or less at its end. `offset` is a multiple of the disk's block size."""
    buffer = mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)  # aligned, as O_DIRECT requires
    fd = _open_past_page_cache(path)
    try:
        return memoryview(buffer)[: min(size_bytes, os.preadv(fd, [buffer], offset))]
    except OSError as exn:
        if exn.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a filesystem with larger blocks
    try:
        return memoryview(os.pread(fd, size_bytes, offset))
    finally:
        os.close(fd)


def _open_past_page_cache(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as exn:
        if exn.errno != errno.EINVAL:
            raise
    return os.open(path, flags)  # a filesystem without O_DIRECT
