"""Verification of a published shard's bytes against the facts in its sidecar.

The facts have the shard's size and the checksum of each of its parts. The store reads them when a
shard is first requested, and verifies a shard when a reader has reported damage. The daemon also
verifies all cached shards in turn, slowly; each verification is a `Scrub`.
"""

import stat
from dataclasses import replace
from pathlib import Path

from shardcache.shared.exceptions import CorruptShardError, ShardError
from shardcache.shared.tarindex.tables import TarIndex, read_header
from shardcache.store.disk.direct_reads import read_direct
from shardcache.store.disk.disk_errors import damage_errors
from shardcache.store.disk.open_files import own_read_lock
from shardcache.store.shard import Facts
from shardcache.transport.between.checksums import crc32c

_BLOCK_BYTES = 1024 * 1024
# Errors that `Facts.from_json` raises for a malformed header.
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)


def read_facts(tar: Path, sidecar: Path, size_bytes: int) -> Facts:
    """Return the facts in a sidecar. Blocks.

    Args:
        size_bytes: the size of the tar.

    Raises CorruptShardError if the facts cannot be read or state another size for the tar;
    ExhaustedError.
    """
    try:
        with damage_errors(sidecar):
            facts = Facts.from_json(read_header(sidecar))
    except (ShardError, FileNotFoundError, *_MALFORMED) as exn:
        raise CorruptShardError(f"the sidecar {sidecar} cannot be read ({exn})") from exn
    if facts.size_bytes != size_bytes:
        raise CorruptShardError(
            f"{tar} has {size_bytes} bytes instead of {facts.size_bytes}",
            url=facts.url,
        )
    return facts


def check_sidecar(sidecar: Path, facts: Facts) -> None:
    """Raise CorruptShardError if a sidecar is damaged, unreadable or that of another shard. Blocks.

    Raises FileNotFoundError, ExhaustedError.
    """
    with damage_errors(sidecar, facts.url):
        index = TarIndex.open(sidecar)
    header = index.header
    index.close()
    try:
        facts_on_disk = Facts.from_json(header)
    except _MALFORMED as exn:
        raise CorruptShardError(
            f"the sidecar {sidecar} cannot be read ({exn})",
            url=facts.url,
        ) from exn
    # The number of samples is not compared: a plain file may have been indexed in the meantime.
    is_same = replace(facts_on_disk, samples=facts.samples) == facts
    if not is_same:
        raise CorruptShardError(f"the sidecar {sidecar} belongs to another shard", url=facts.url)


class Scrub:
    """Verification of one shard, in steps; each step reads one block of the tar.

    The sidecar is checked first. Then the tar is read block by block; at the end of each part, the
    part's checksum is compared with the checksum in the facts.

    The tar is open only during a step, so that the shard can be evicted between steps; an eviction
    that comes during a step waits for the step's end. The tar is read with O_DIRECT. So the bytes
    come from the disk rather than from memory, and no pages are added to the page cache or evicted
    from it.

    Args:
        sidecar: path of the sidecar; None to verify the tar alone.

    Attributes:
        read_bytes: bytes of the tar read so far.
    """

    def __init__(self, tar: Path, sidecar: Path | None, facts: Facts) -> None:
        self.read_bytes = 0
        self._tar = tar
        self._sidecar = sidecar
        self._facts = facts
        self._crc = 0  # CRC32C of the bytes of the present part that have been read

    def run(self) -> None:
        """Verify the whole shard. Blocks, and raises as `step` does."""
        while self.step():
            pass

    def step(self) -> int:
        """Verify the next block and return its size in bytes; 0 after the last.

        Raises CorruptShardError if the sidecar, or a part that this step completes, is damaged or
        unreadable; FileNotFoundError if the shard is gone; ExhaustedError.
        """
        if not self.read_bytes:
            self._check_before_reading()
        wanted_bytes = self._next_block_bytes()
        if not wanted_bytes:
            return 0

        with own_read_lock(self._tar), damage_errors(self._tar, self._facts.url):
            block = read_direct(self._tar, self.read_bytes, wanted_bytes)
        if len(block) < wanted_bytes:
            raise self._damaged(f"ends at byte {self.read_bytes + len(block)}")

        self._crc = crc32c(block, self._crc)
        self.read_bytes += wanted_bytes
        self._check_part()
        return wanted_bytes

    def _check_before_reading(self) -> None:
        """Check the sidecar, and that the tar is a plain file and not too large.

        A tar that is too short is noticed later, by the read that ends early: its error can then
        state where the tar ends.
        """
        if self._sidecar is not None:
            check_sidecar(self._sidecar, self._facts)
        with damage_errors(self._tar, self._facts.url):
            status = self._tar.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise self._damaged("is not a plain file")
        if status.st_size > self._facts.size_bytes:
            raise self._damaged(f"has {status.st_size} bytes instead of {self._facts.size_bytes}")

    def _next_block_bytes(self) -> int:
        """Return the size of the next block, which never crosses the end of a part."""
        left_of_part_bytes = self._facts.part_bytes - self.read_bytes % self._facts.part_bytes
        left_of_tar_bytes = self._facts.size_bytes - self.read_bytes
        return min(_BLOCK_BYTES, left_of_part_bytes, left_of_tar_bytes)

    def _check_part(self) -> None:
        """If the last block has completed a part, compare the part's checksum with the facts."""
        part_bytes = self._facts.part_bytes
        is_end_of_part = self.read_bytes % part_bytes == 0
        is_end_of_tar = self.read_bytes == self._facts.size_bytes  # the last part may be shorter
        if not (is_end_of_part or is_end_of_tar):
            return

        number = (self.read_bytes - 1) // part_bytes
        if self._crc != self._facts.part_crcs[number]:
            raise self._damaged(f"is damaged near byte {number * part_bytes}")
        self._crc = 0

    def _damaged(self, fault: str) -> CorruptShardError:
        """Return the error that reports a damaged tar.

        Args:
            fault: the predicate of the error's message, such as "is damaged near byte 0".
        """
        return CorruptShardError(f"the cached file {self._tar} {fault}", url=self._facts.url)
