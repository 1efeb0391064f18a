"""A file of a table's rows, in which a row is found by its key. All processes map it into memory.

    rows        each row on a line, as JSON: [key, row]
    hashes      u64[rows]: hashes of the keys, ascending
    offsets     u64[rows]: offset of the row of each hash
    footer      magic, number of rows, offset of the hashes

Numbers are in native byte order, since the file never leaves its node. Only the pages that are
looked at take memory: 16 bytes per row for hashes and offsets, and the rows that are read. `write`
sorts the hashes in buckets by their first byte, so that it never has more than one bucket in
memory.
"""

import hashlib
import json
import mmap
import shutil
import struct
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from shardcache.errors import CacheDirError

_MAGIC = b"shardrow"
_FOOTER = struct.Struct("=8sQQ")
_PAIR = struct.Struct("=QQ")
_BUCKETS = 256
_BUCKET_SHIFT = 56  # leaves the first byte of a 64-bit hash, which is the number of the bucket
_ALIGNMENT_BYTES = 8  # the hashes begin at a multiple of this, as they are 64-bit numbers


def _hash_of(key: str) -> int:
    """Return a 64-bit number for a key, the same in every process."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


class RowCounts(NamedTuple):
    """Numbers of rows in a file.

    Attributes:
        rows: number of all rows.
        repeated: number of rows with a key that an earlier row has as well.
    """

    rows: int
    repeated: int


def write(file: IO[bytes], rows: Iterable[tuple[str, str]], folder: Path) -> RowCounts:
    """Write a file of rows.

    Args:
        file: the file to write to, at its beginning.
        rows: each row as its key and its JSON text.
        folder: folder for temporary files, which take as much space as hashes and offsets together.
    """
    with ExitStack() as opened:
        buckets = [
            opened.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(_BUCKETS)
        ]
        offset = 0
        count = 0
        for key, row in rows:
            key_hash = _hash_of(key)
            buckets[key_hash >> _BUCKET_SHIFT].write(_PAIR.pack(key_hash, offset))
            line = f"[{json.dumps(key)},{row}]\n".encode("utf-8", "surrogatepass")
            file.write(line)
            offset += len(line)
            count += 1
        padding = -offset % _ALIGNMENT_BYTES
        file.write(b"\n" * padding)

        offsets = opened.enter_context(tempfile.TemporaryFile(dir=folder))
        repeated = 0
        for bucket in buckets:
            numbers = _numbers_in(bucket)  # for each row in turn: its hash, then its offset
            pairs = sorted(zip(numbers[0::2], numbers[1::2], strict=True))
            hashes = array("Q", [key_hash for key_hash, _ in pairs])
            repeated += len(hashes) - len(set(hashes))
            file.write(hashes)
            offsets.write(array("Q", [begin for _, begin in pairs]))
        offsets.seek(0)
        shutil.copyfileobj(offsets, file)
        file.write(_FOOTER.pack(_MAGIC, count, offset + padding))
    return RowCounts(count, repeated)


def _numbers_in(file: IO[bytes]) -> "array[int]":
    """Return the 64-bit numbers of a file from its beginning."""
    file.seek(0)
    numbers = array("Q")
    numbers.frombytes(file.read())
    return numbers


class RowIndex:
    """The rows of a file that `write` has written, found by their keys."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises CacheDirError for another kind of file, OSError if unreadable."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)  # 0: the whole file
        self._map.madvise(mmap.MADV_RANDOM)
        magic, count, hashes_at = _FOOTER.unpack(self._map[-_FOOTER.size :])
        end = hashes_at + count * _PAIR.size
        if magic != _MAGIC or end + _FOOTER.size != len(self._map):
            raise CacheDirError(f"{path} is not a table of rows, or is damaged", remedy="remove it")
        numbers = memoryview(self._map)[hashes_at:end].cast("Q")
        self._hashes = numbers[:count]
        self._offsets = numbers[count:]

    def __len__(self) -> int:
        return len(self._hashes)

    def rows(self, key: str) -> list[dict[str, Any]]:
        """Return the rows with a key: one, none, or several."""
        # Different keys may have the same hash, so the keys are compared as well.
        key_hash = _hash_of(key)
        rows = []
        place = bisect_left(self._hashes, key_hash)
        while place < len(self) and self._hashes[place] == key_hash:
            own_key, row = self._row_at(self._offsets[place])
            if own_key == key:
                rows.append(row)
            place += 1
        return rows

    def some_keys(self, count: int) -> list[str]:
        """Return the keys of some rows, for messages."""
        rows = [self._row_at(offset) for offset in sorted(self._offsets[:count])]
        return [key for key, _ in rows]

    def _row_at(self, offset: int) -> tuple[str, dict[str, Any]]:
        """Return the key and the row of the line at an offset."""
        key, row = json.loads(self._map[offset : self._map.find(b"\n", offset)])
        return key, row
