"""Verification of a published shard's bytes against the facts in its sidecar."""

import errno
import mmap
import os
import stat
from dataclasses import replace
from pathlib import Path

from shardcache.errors import CorruptShardError
from shardcache.store.disk.disk_errors import damage_errors
from shardcache.store.shard import Facts
from shardcache.tarindex.tables import TarIndex
from shardcache.transport.checksums import crc32c

BLOCK_BYTES = 1024 * 1024


def check_index(sidecar: Path, facts: Facts) -> None:
    """Raise CorruptShardError if a sidecar is damaged, unreadable or of other facts. Blocks.

    Raises FileNotFoundError, ExhaustedError.
    """
    with damage_errors(sidecar, facts.url):
        index = TarIndex.open(sidecar)
    header = index.header
    index.close()
    try:
        found = Facts.from_json(header)
    except (KeyError, TypeError, ValueError, OverflowError) as exn:
        raise CorruptShardError(
            f"the sidecar {sidecar} cannot be read ({exn})",
            url=facts.url,
        ) from exn
    if replace(found, samples=facts.samples) != facts:  # a file may have been indexed since
        raise CorruptShardError(f"the sidecar {sidecar} is of another shard", url=facts.url)


class Scrub:
    """The verification of one shard, in steps that each block for the time of one block's read.

    Without a sidecar, it verifies the tar alone.

    The file is open only during a step, so that the shard can be evicted between steps. It is read
    with O_DIRECT: what is on the disk rather than in memory, and without adding pages to the page
    cache or evicting any.
    """

    def __init__(self, tar: Path, sidecar: Path | None, facts: Facts) -> None:
        self.read_bytes = 0
        self._tar = tar
        self._sidecar = sidecar
        self._facts = facts
        self._crc = 0

    def run(self) -> None:
        """Verify the whole shard. Blocks, and raises as `step` does."""
        while self.step():
            pass

    def step(self) -> int:
        """Verify the next block and return its size in bytes; 0 after the last.

        Raises CorruptShardError if the sidecar, or a piece that this step completes, is damaged or
        unreadable; FileNotFoundError if the shard is gone; ExhaustedError.
        """
        if not self.read_bytes:
            self._check_form()
        wanted_bytes = self._block_bytes()
        if not wanted_bytes:
            return 0
        with damage_errors(self._tar, self._facts.url):
            block = _read(self._tar, self.read_bytes, wanted_bytes)
        if len(block) < wanted_bytes:
            raise self._damaged(f"ends at byte {self.read_bytes + len(block)}")
        self._crc = crc32c(block, self._crc)
        self.read_bytes += wanted_bytes
        self._check_piece()
        return wanted_bytes

    def _check_form(self) -> None:
        """Check the sidecar, and what readers check of the tar."""
        if self._sidecar is not None:
            check_index(self._sidecar, self._facts)
        with damage_errors(self._tar, self._facts.url):
            found = self._tar.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise self._damaged("is not a plain file")
        if found.st_size > self._facts.size_bytes:
            raise self._damaged(f"has {found.st_size} bytes instead of {self._facts.size_bytes}")

    def _check_piece(self) -> None:
        number, past_bytes = divmod(self.read_bytes - 1, self._facts.part_bytes)
        if past_bytes + 1 < self._facts.part_bytes and self.read_bytes < self._facts.size_bytes:
            return  # the piece is not complete yet
        if self._crc != self._facts.part_crcs[number]:
            raise self._damaged(f"is damaged near byte {number * self._facts.part_bytes}")
        self._crc = 0

    def _block_bytes(self) -> int:
        """Return the size of the next block, which never crosses the end of a piece."""
        left_bytes = self._facts.part_bytes - self.read_bytes % self._facts.part_bytes
        return min(BLOCK_BYTES, left_bytes, self._facts.size_bytes - self.read_bytes)

    def _damaged(self, what: str) -> CorruptShardError:
        return CorruptShardError(f"the cached file {self._tar} {what}", url=self._facts.url)


def _read(path: Path, offset: int, size_bytes: int) -> memoryview:
    """Return `size_bytes` of a file, or less at its end.

    `offset` is a multiple of the disk's block size.
    """
    try:
        return _pread(path, os.O_DIRECT, offset, size_bytes)
    except OSError as exn:
        if exn.errno != errno.EINVAL:
            raise
    return _pread(path, 0, offset, size_bytes)  # no O_DIRECT there, or larger blocks


def _pread(path: Path, flags: int, offset: int, size_bytes: int) -> memoryview:
    whole_pages = -(-size_bytes // mmap.PAGESIZE)
    buffer = mmap.mmap(-1, whole_pages * mmap.PAGESIZE)  # aligned, as O_DIRECT requires
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        return memoryview(buffer)[: min(size_bytes, os.preadv(fd, [buffer], offset))]
    finally:
        os.close(fd)
