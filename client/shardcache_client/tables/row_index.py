"""A file of a table's rows, in which a row is found by its key. All processes map it into memory.

It consists of:

    rows        each row on a line, as JSON: [key, row]
    entries     u64[rows]: some bits of the hash of a row's key, then the offset of the row
    starts      u64[groups + 1]: number of each group's first entry, then the number of all entries
    footer      magic, number of rows, offset of the entries, number of groups

The first bits of a key's hash are the number of its group. Entries are sorted by hash, so those of
a group are adjacent, and a search reads one or two pages of them.

Numbers are in native byte order, since the file never leaves its node. The entries take 8 bytes of
memory per row, and only the pages that are read are in memory. `write` sorts the entries in
buckets, by the first byte of the hash, and has only one bucket in memory at a time.
"""

import hashlib
import json
import mmap
import os
import struct
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from shardcache.shared.exceptions import CacheDirError

_MAGIC = b"shardro2"
_FOOTER = struct.Struct("=8sQQQ")
_NUMBER_BYTES = 8
_ALIGNMENT_BYTES = 8  # the entries begin at a multiple of this, as they are 64-bit numbers

_HASH_BITS = 64
# The lower bits of an entry are an offset, so all rows together may have 16 TiB.
_OFFSET_BITS = 44
_MAX_OFFSET = (1 << _OFFSET_BITS) - 1
# The upper bits of an entry are the bits of the hash that follow those of the group. Two rows of a
# group may have the same bits here; then their keys are compared.
_ENTRY_HASH_BITS = 64 - _OFFSET_BITS
_MAX_ENTRY_HASH = (1 << _ENTRY_HASH_BITS) - 1
# A large table has 64 to 128 entries in a group, on average.
_GROUP_SIZE_BITS = 7

# While a table is written, each row has a record in the bucket for the first byte of its hash. A
# record is the hash and the offset, which are sorted as one 128-bit number. A group's number has at
# least as many bits as a bucket's, so no group is in two buckets.
_BUCKET_BITS = 8
_RECORD = struct.Struct(">QQ")
_RECORD_BITS = 128
_RECORD_OFFSET_BITS = 64
_MAX_RECORD_OFFSET = (1 << _RECORD_OFFSET_BITS) - 1


def _hash_of(key: str) -> int:
    """Return a 64-bit number for a key, the same in every process."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def _entry_of(key_hash: int, offset: int, group_bits: int) -> int:
    """Return the entry of a row in its group.

    Args:
        key_hash: hash of the row's key.
        offset: offset of the row in the file.
        group_bits: number of bits of a group's number.
    """
    following_bits = key_hash >> (_HASH_BITS - group_bits - _ENTRY_HASH_BITS)
    return ((following_bits & _MAX_ENTRY_HASH) << _OFFSET_BITS) | offset


class RowCounts(NamedTuple):
    """Numbers of rows in a file.

    Attributes:
        rows: number of all rows.
        repeated: number of rows with a key that an earlier row has as well.
    """

    rows: int
    repeated: int


def write(file: IO[bytes], rows: Iterable[tuple[str, str]], temp_folder: Path) -> RowCounts:
    """Write a file of rows.

    Args:
        file: the file to write to, at its beginning.
        rows: each row as its key and its line: the JSON of [key, row].
        temp_folder: folder for temporary files, which take 16 bytes per row.
    """
    with ExitStack() as open_files:
        buckets = [
            open_files.enter_context(tempfile.TemporaryFile(dir=temp_folder))
            for _ in range(1 << _BUCKET_BITS)
        ]
        count, rows_end = _write_rows(file, rows, buckets)
        padding = -rows_end % _ALIGNMENT_BYTES
        file.write(b"\n" * padding)

        group_bits = max(_BUCKET_BITS, count.bit_length() - _GROUP_SIZE_BITS)
        groups = 1 << group_bits
        entries_offset = rows_end + padding
        repeated = _write_entries(file, buckets, group_bits)
        file.write(_FOOTER.pack(_MAGIC, count, entries_offset, groups))
    return RowCounts(count, repeated)


def _write_rows(
    file: IO[bytes], rows: Iterable[tuple[str, str]], buckets: Sequence[IO[bytes]]
) -> tuple[int, int]:
    """Write the rows to the file, and a record of each to its bucket.

    Returns the number of rows, and their size in bytes.
    """
    count = 0
    offset = 0
    for key, line in rows:
        key_hash = _hash_of(key)
        bucket = buckets[key_hash >> (_HASH_BITS - _BUCKET_BITS)]
        bucket.write(_RECORD.pack(key_hash, offset))
        encoded = f"{line}\n".encode("utf-8", "surrogatepass")
        file.write(encoded)
        offset += len(encoded)
        count += 1
    return count, offset


def _write_entries(file: IO[bytes], buckets: Sequence[IO[bytes]], group_bits: int) -> int:
    """Write the entries of all rows, and then the starts of the groups.

    Returns the number of rows whose key's hash an earlier row has as well.

    Args:
        file: the file of rows.
        buckets: the records of the rows.
        group_bits: number of bits of a group's number.
    """
    starts = array("Q")
    written = 0
    repeated = 0
    for number, bucket in enumerate(buckets):
        records = _sorted_records(bucket)
        starts.extend(written + start for start in _group_starts(records, number, group_bits))
        entries = array("Q")
        previous_hash = None
        for record in records:
            key_hash = record >> _RECORD_OFFSET_BITS
            offset = record & _MAX_RECORD_OFFSET
            if key_hash == previous_hash:
                repeated += 1
            previous_hash = key_hash
            entries.append(_entry_of(key_hash, offset, group_bits))
        file.write(entries)
        written += len(entries)
    starts.append(written)
    file.write(starts)
    return repeated


def _sorted_records(bucket: IO[bytes]) -> list[int]:
    """Return the records of a bucket as 128-bit numbers, ascending."""
    bucket.seek(0)
    data = bucket.read()
    # One number takes half the memory of a tuple of hash and offset.
    records = [
        int.from_bytes(data[start : start + _RECORD.size], "big")
        for start in range(0, len(data), _RECORD.size)
    ]
    records.sort()
    return records


def _group_starts(records: list[int], bucket: int, group_bits: int) -> list[int]:
    """Return where the records of each of a bucket's groups begin.

    Args:
        records: the sorted records of the bucket.
        bucket: number of the bucket.
        group_bits: number of bits of a group's number.
    """
    groups_per_bucket = 1 << (group_bits - _BUCKET_BITS)
    first_group = bucket * groups_per_bucket
    # The smallest record that a group can have is the group's number, followed by zeros.
    return [
        bisect_left(records, group << (_RECORD_BITS - group_bits))
        for group in range(first_group, first_group + groups_per_bucket)
    ]


class RowIndex:
    """The rows of a file that `write` has written, found by their keys."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises CacheDirError for a file of another kind, or one that was cut; OSError if it cannot
        be read.
        """
        self._path = path
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < _FOOTER.size:  # an empty file cannot be mapped
                raise self._damaged()
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)  # 0: the whole file
        self._map.madvise(mmap.MADV_RANDOM)
        magic, count, entries_offset, groups = _FOOTER.unpack(self._map[-_FOOTER.size :])
        starts_offset = entries_offset + count * _NUMBER_BYTES
        end = starts_offset + (groups + 1) * _NUMBER_BYTES
        if magic != _MAGIC or end + _FOOTER.size != len(self._map):
            raise self._damaged()
        view = memoryview(self._map)
        self._entries = view[entries_offset:starts_offset].cast("Q")
        self._starts = view[starts_offset:end].cast("Q")
        self._group_bits = groups.bit_length() - 1  # `groups` is a power of two

    def __len__(self) -> int:
        return len(self._entries)

    def rows(self, key: str) -> list[dict[str, Any]]:
        """Return the rows with a key: one, none, or several.

        Raises CacheDirError if the file was damaged after it was written.
        """
        key_hash = _hash_of(key)
        group = key_hash >> (_HASH_BITS - self._group_bits)
        end = self._starts[group + 1]
        # The smallest entry that a row with this key can have, and the smallest after all of these.
        first_entry = _entry_of(key_hash, 0, self._group_bits)
        stop_entry = first_entry + (1 << _OFFSET_BITS)
        number = bisect_left(self._entries, first_entry, self._starts[group], end)
        rows = []
        while number < end and self._entries[number] < stop_entry:
            # Hashes of other keys may have the same bits, so the keys are compared as well.
            row_key, row = self._row_at(self._entries[number] & _MAX_OFFSET)
            if row_key == key:
                rows.append(row)
            number += 1
        return rows

    def some_keys(self, count: int) -> list[str]:
        """Return the keys of at most `count` rows, for messages. Raises as `rows` does."""
        # Entries are in the order of hashes. Sorted, the keys come in the order of the rows.
        offsets = sorted(entry & _MAX_OFFSET for entry in self._entries[:count])
        keys = []
        for offset in offsets:
            key, _ = self._row_at(offset)
            keys.append(key)
        return keys

    def _row_at(self, offset: int) -> tuple[str, dict[str, Any]]:
        """Return the key and the row of the line at an offset.

        Raises CacheDirError if there is no row, as the file was damaged after it was written.
        """
        line_end = self._map.find(b"\n", offset)
        try:
            key, row = json.loads(self._map[offset:line_end])
        except ValueError:
            raise self._damaged() from None
        return key, row

    def _damaged(self) -> CacheDirError:
        return CacheDirError(
            f"{self._path} is not a table of rows, or is damaged", remedy="remove it"
        )
