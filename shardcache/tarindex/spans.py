"""Spans of samples in their tar: for most samples, some blocks that are a small tar by themselves.

A row of a sample table (`contents`) has them as `first_block`, the number of the 512-byte block
where its first sample begins; `blocks`, for each sample the number of blocks up to where the next
one begins; and `irregular`, the places in the row of the samples whose members do not simply follow
one another: in the order of `sizes`, each behind a header of one block. A sample that takes other
bytes of the tar to be read, such as a line of a member or a hard link, has its number of blocks
negated, or 0.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from zlib import crc32

from shardcache.errors import ShardError
from shardcache.tarindex.grouping import group
from shardcache.tarindex.members import BLOCK_BYTES, Tar
from shardcache.tarindex.tables import Samples, Tables, TarBytes

# What others may have put between two samples, and a reader of the second one skips.
_MAX_BETWEEN_BYTES = 64 * 1024


def samples_in(data: bytes, url: str) -> Samples:
    """Return the samples of whole members: of a span of a tar, in bytes.

    Raises what iterating a `Tar` raises.
    """

    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        return data[at : at + max_bytes]

    return group(Tar(read, len(data), url, require_end=False, ignore_trailing_data=True))


def blocks_of(tables: Tables, tar: TarBytes | None) -> Iterator[int]:
    """Yield the number of blocks of each sample; see the module.

    Args:
        tables: the samples.
        tar: its bytes, in which each span is tried; None if all samples were written alike.
    """
    begin = 0
    first = 0
    for number, last in enumerate(tables.member_ends):
        end_byte = max(tables.ends[first:last], default=0)
        end = max(begin, _blocks(end_byte))
        blocks = end - begin
        if _is_alone(tables, number, range(first, last), begin, blocks, tar):
            yield blocks
        else:
            yield -blocks
        begin = end
        first = last


def _is_alone(
    tables: Tables,
    number: int,
    members: range,
    begin: int,
    blocks: int,
    tar: TarBytes | None,
) -> bool:
    """Return whether a sample can be read from its blocks alone."""
    if not members or number in tables.faults:
        return False
    starts = tables.starts[members.start : members.stop]
    ends = tables.ends[members.start : members.stop]
    if min(starts) < (begin + 1) * BLOCK_BYTES:
        return False
    own = sum(map(_member_blocks, starts, ends))
    if (blocks - own) * BLOCK_BYTES > _MAX_BETWEEN_BYTES:
        return False
    if tar is None:
        return True

    begin_byte = begin * BLOCK_BYTES
    try:
        found = samples_in(tar[begin_byte : begin_byte + blocks * BLOCK_BYTES], "")
    except ShardError:
        return False
    return _members_of(found, 0, 0) == _members_of(tables, number, begin_byte)


def _members_of(
    tables: Tables, number: int, begin_byte: int
) -> list[tuple[bytes, str, int, int]] | None:
    """Return key, extension, start and end of each member of a sample; None unless it is sound."""
    if number >= len(tables.member_ends) or number in tables.faults:
        return None
    key_start = tables.key_ends[number - 1] if number else 0
    key = bytes(tables.keys[key_start : tables.key_ends[number]])
    first = tables.member_ends[number - 1] if number else 0
    found = []
    for member in range(first, tables.member_ends[number]):
        extension = tables.extensions[tables.extension_ids[member]]
        start = tables.starts[member] - begin_byte
        found.append((key, extension, start, tables.ends[member] - begin_byte))
    return found


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


def _member_blocks(start: int, end: int) -> int:
    """Return the number of blocks of a member with a header of one block."""
    return 1 + _blocks(end - start)


def irregular_in(
    tables: Tables, numbers: range, blocks: Sequence[int], columns: Iterable[str]
) -> list[int]:
    """Return which of the samples `numbers` have members that do not simply follow one another.

    Args:
        blocks: of each of them.
        columns: extensions, in the order in which members should follow.
    """
    names = list(columns)
    places = [names.index(name) if name in names else -1 for name in tables.extensions]
    found = []
    for nth, number in enumerate(numbers):
        first = tables.member_ends[number - 1] if number else 0
        last = tables.member_ends[number]
        own = sum(map(_member_blocks, tables.starts[first:last], tables.ends[first:last]))
        order = [places[each] for each in tables.extension_ids[first:last]]
        if blocks[nth] > 0 and (own != blocks[nth] or order != sorted(order)):
            found.append(nth)
    return found


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Ranges of the samples of a row: 12 bytes each.

    Attributes:
        starts: the block at which each sample's bytes begin.
        stops: the block at which they end; that at which they begin if they are not enough.
        checks: of the keys, CRC-32.
    """

    starts: "array[int]"
    stops: "array[int]"
    checks: "array[int]"

    @classmethod
    def of(cls, row: Mapping[str, Any], reads: Callable[[str], bool] | None = None) -> Self:
        """Take the spans out of a row; none are enough if it was written without.

        Args:
            reads: chooses the members that samples have, by extension; None for all.

        Raises KeyError, TypeError, ValueError, IndexError, AttributeError or OverflowError for a
        row that is not one.
        """
        keys = row["keys"]
        checks = array("I", map(check_of, keys))
        starts = array("I")
        stops = array("I")
        end = row.get("first_block", 0)
        for blocks in row.get("blocks") or [0] * len(keys):
            starts.append(end)
            stops.append(end + max(blocks, 0))
            end += abs(blocks)
        if len(starts) != len(checks):
            raise ValueError(f"{len(starts)} spans of {len(checks)} samples")
        spans = cls(starts, stops, checks)
        if reads is not None:
            spans._narrow(row, reads)
        return spans

    def _narrow(self, row: Mapping[str, Any], reads: Callable[[str], bool]) -> None:
        """Leave out the members before and after those that are read."""
        columns = [(reads(name), sizes) for name, sizes in row["sizes"].items()]
        if all(is_read for is_read, _ in columns):
            return
        irregular = frozenset(row.get("irregular", ()))
        for place, start in enumerate(self.starts):
            if place in irregular or start == self.stops[place]:
                continue
            at = start
            read_blocks: list[int] = []
            for is_read, sizes in columns:
                size_bytes = sizes[place]
                if size_bytes is None:
                    continue
                end = at + _member_blocks(0, size_bytes)
                if is_read:
                    read_blocks += (at, end)
                at = end
            if read_blocks:  # otherwise, errors name the members that there are
                self.starts[place] = read_blocks[0]
                self.stops[place] = read_blocks[-1]

    def __len__(self) -> int:
        return len(self.checks)

    def span(self, place: int) -> tuple[int, int] | None:
        """Return start and end in the tar of a sample's bytes; None if they are not enough."""
        start = self.starts[place]
        stop = self.stops[place]
        if start == stop:
            return None
        return start * BLOCK_BYTES, stop * BLOCK_BYTES


def check_of(key: str) -> int:
    """Return the number by which keys are compared, where there is no space for keys."""
    return crc32(key.encode("utf-8", "surrogateescape"))
