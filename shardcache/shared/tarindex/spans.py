"""Spans of samples: the blocks of 512 bytes in the tar from which a sample can be read alone.

For most samples, these blocks are a small tar by themselves. A client that reads single samples
fetches only these. `shardcache index --samples` and `shardcache write` compute them for the sample
table (`contents`). A row of the table lists some samples of a shard, and has these fields:

    first_block     number of the block at which the row's first sample begins
    blocks          for each sample, the number of blocks up to the next sample. The number is
                    negated, or 0, if the sample cannot be read from these blocks alone, such as a
                    line of a member, or a hard link.
    irregular       the places of the irregular samples, counted from 0 in the row. A regular sample
                    has one member after another, in the order of the row's `sizes`, each with a
                    header of one block. So the offset of each member follows from the sizes.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self
from zlib import crc32

from shardcache.shared.exceptions import ShardError
from shardcache.shared.tarindex.grouping import group, splitter_of
from shardcache.shared.tarindex.members import BLOCK_BYTES, Tar
from shardcache.shared.tarindex.tables import Samples, Tables, TarBytes, key_of, members_of

# Other programs may put something between two samples, which is then fetched with the first of
# them. If it has more bytes than this, the sample counts as one that cannot be read alone.
_MAX_BETWEEN_BYTES = 64 * 1024
# Members that are not read, between two that are, are left out if they take at least this number of
# blocks. The daemon fetches ranges in parts of 256 KiB (`--range-part-size`), so no part would be
# saved by a gap that is smaller than a part. This one has a whole part, wherever it begins.
_MIN_GAP_BLOCKS = 512 * 1024 // BLOCK_BYTES


def samples_in(data: bytes, url: str) -> Samples:
    """Return the samples in a span of a tar.

    Raises what iterating a `Tar` raises.

    Args:
        data: the bytes of the span: whole members, each with its headers.
        url: url of the shard, for errors, and for the way in which it splits names into keys.
    """

    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        return data[at : at + max_bytes]

    members = Tar(read, len(data), url, require_end=False, ignore_trailing_data=True)
    return group(members, splitter_of(url))


def blocks_of(tables: Tables, tar: TarBytes | None, url: str = "") -> Iterator[int]:
    """Yield the number of blocks of each sample, as in a row's field `blocks`.

    Args:
        tables: the samples.
        tar: the bytes of the tar, to read each sample from its blocks as a trial. None for a tar
            that `ShardFile` has just written, which needs no trial.
        url: url of the shard, which says how names are split into keys; not needed without `tar`.
    """
    begin_block = 0
    first_member = 0
    for number, end_member in enumerate(tables.member_ends):
        end_byte = max(tables.ends[first_member:end_member], default=0)
        end_block = max(begin_block, _blocks_for(end_byte))
        blocks = end_block - begin_block
        members = range(first_member, end_member)
        if _blocks_suffice(tables, number, members, begin_block, blocks, tar, url):
            yield blocks
        else:
            yield -blocks
        begin_block = end_block
        first_member = end_member


def _blocks_suffice(
    tables: Tables,
    number: int,
    members: range,
    begin_block: int,
    blocks: int,
    tar: TarBytes | None,
    url: str,
) -> bool:
    """Return whether a sample can be read from its blocks alone.

    Args:
        tables: the samples of the shard.
        number: number of the sample.
        members: numbers of the sample's members.
        begin_block: number of the sample's first block.
        blocks: number of blocks that the sample has.
        tar: as for `blocks_of`.
        url: url of the shard.
    """
    if not members or number in tables.faults:
        return False
    starts = tables.starts[members.start : members.stop]
    ends = tables.ends[members.start : members.stop]
    # The bytes of a hard link or a packed line belong to another member, and lie before the end of
    # the block that would be the header of this sample's first member.
    if min(starts) < (begin_block + 1) * BLOCK_BYTES:
        return False
    own_blocks = sum(map(_member_blocks, starts, ends))
    if (blocks - own_blocks) * BLOCK_BYTES > _MAX_BETWEEN_BYTES:
        return False
    if tar is None:
        return True

    # The blocks suffice if they contain the same sample as the whole tar.
    begin_byte = begin_block * BLOCK_BYTES
    end_byte = begin_byte + blocks * BLOCK_BYTES
    try:
        samples = samples_in(tar[begin_byte:end_byte], url)
    except ShardError:
        return False
    # In the blocks alone, the sample is the first one, and its offsets begin at 0.
    members_in_blocks = _described_members(samples, number=0, begin_byte=0)
    return members_in_blocks == _described_members(tables, number, begin_byte)


def _described_members(
    tables: Tables,
    number: int,
    begin_byte: int,
) -> list[tuple[str, str, int, int]] | None:
    """Return key, extension, start and end of each member of a sample.

    Start and end are relative to `begin_byte`. Returns None for a sample that does not exist, or
    has a fault.
    """
    if number >= len(tables.member_ends) or number in tables.faults:
        return None
    key = key_of(tables, number)
    members = []
    for member in members_of(tables, number):
        extension = tables.extensions[tables.extension_ids[member]]
        start = tables.starts[member] - begin_byte
        end = tables.ends[member] - begin_byte
        members.append((key, extension, start, end))
    return members


def _blocks_for(size_bytes: int) -> int:
    """Return the number of blocks that `size_bytes` take, with the last block padded."""
    return (size_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES


def _member_blocks(start: int, end: int) -> int:
    """Return the number of blocks of a member with a header of one block."""
    return 1 + _blocks_for(end - start)


def irregular_in(
    tables: Tables,
    numbers: range,
    blocks: Sequence[int],
    columns: Iterable[str],
) -> list[int]:
    """Return the places of a row's irregular samples, as in the row's field `irregular`.

    Args:
        tables: the samples of the shard.
        numbers: numbers of the row's samples.
        blocks: the row's field `blocks`.
        columns: extensions, in the order in which a regular sample has its members.
    """
    rank_of_column = {name: rank for rank, name in enumerate(columns)}
    # By the extension's id, its rank in `columns`; -1 for an extension that is not among them.
    column_ranks = [rank_of_column.get(name, -1) for name in tables.extensions]
    irregular = []
    for place, number in enumerate(numbers):
        if blocks[place] <= 0:
            continue  # the sample cannot be read from its blocks anyway
        members = members_of(tables, number)
        starts = tables.starts[members.start : members.stop]
        ends = tables.ends[members.start : members.stop]
        own_blocks = sum(map(_member_blocks, starts, ends))
        ranks = [column_ranks[tables.extension_ids[member]] for member in members]
        has_other_blocks = own_blocks != blocks[place]  # longer headers, or something in between
        is_ordered = ranks == sorted(ranks)
        if has_other_blocks or not is_ordered:
            irregular.append(place)
    return irregular


class Gaps(NamedTuple):
    """A gap in the span of each sample of a row, where members lie that are not read.

    Attributes:
        starts: for each sample, the number of the block at which the gap begins.
        stops: for each sample, the number of the block at which the gap ends; equal to its start
            if the sample has no such gap.
    """

    starts: "array[int]"
    stops: "array[int]"


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Spans of the samples of a row, which take 12 bytes of memory per sample.

    Gaps take further 8 bytes per sample, for each gap of the sample that has the most of them.

    Attributes:
        starts: for each sample, the number of the block at which its bytes begin.
        stops: for each sample, the number of the block at which its bytes end; equal to its start
            if the sample cannot be read from its own blocks alone.
        key_hashes: for each sample, the `key_hash` of its key.
        gaps: the first gap of each sample, the second gap, and so on; empty if no sample has any.
    """

    starts: "array[int]"
    stops: "array[int]"
    key_hashes: "array[int]"
    gaps: list[Gaps] = field(default_factory=list)

    @classmethod
    def of(cls, row: Mapping[str, Any], wants: Callable[[str], bool] | None = None) -> Self:
        """Take the spans out of a row; all are empty if it was written without spans.

        Args:
            row: a row of a sample table.
            wants: returns whether members with an extension are read. The spans are narrowed to
                these members where possible. None if all members are read.

        Raises KeyError, TypeError, ValueError, IndexError, AttributeError or OverflowError for a
        row with other fields, or values of other types.
        """
        keys = row["keys"]
        key_hashes = array("I", map(key_hash, keys))
        starts = array("I")
        stops = array("I")
        begin = row.get("first_block", 0)
        blocks_of_samples = row.get("blocks") or [0] * len(keys)
        for blocks in blocks_of_samples:
            starts.append(begin)
            # A negative number marks a sample that needs other bytes, too: its span is empty.
            stops.append(begin + max(blocks, 0))
            begin += abs(blocks)
        if len(starts) != len(key_hashes):
            raise ValueError(f"{len(starts)} spans of {len(key_hashes)} samples")
        spans = cls(starts, stops, key_hashes)
        if wants is not None:
            spans._narrow(row, wants)
        return spans

    def __len__(self) -> int:
        return len(self.key_hashes)

    def span(self, place: int) -> tuple[int, int] | None:
        """Return the offsets in the tar at which a sample starts and ends.

        Returns None if the sample cannot be read from its own blocks alone.

        Args:
            place: place of the sample in the row.
        """
        start = self.starts[place]
        stop = self.stops[place]
        if start == stop:
            return None
        return start * BLOCK_BYTES, stop * BLOCK_BYTES

    def gaps_of(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return the offsets in the tar at which each gap in a sample's span starts and ends.

        The bytes before, between and after the gaps are those of the members that are read.

        Args:
            place: place of the sample in the row.
        """
        return tuple(
            (starts[place] * BLOCK_BYTES, stops[place] * BLOCK_BYTES)
            for starts, stops in self.gaps
            if starts[place] < stops[place]
        )

    def _narrow(self, row: Mapping[str, Any], wants: Callable[[str], bool]) -> None:
        """Shorten the span of each regular sample to the members that are read.

        Members before the first and after the last such member are left out, and large members
        between two such members.
        """
        columns = [(wants(name), sizes) for name, sizes in row["sizes"].items()]
        if all(is_read for is_read, _ in columns):
            return
        irregular = frozenset(row.get("irregular", ()))
        for place, start in enumerate(self.starts):
            # In an irregular sample, the offsets of the members are unknown. A sample with an empty
            # span cannot be read from its blocks anyway.
            if place in irregular or start == self.stops[place]:
                continue
            read_spans = _read_spans(columns, place, start)
            # If no member is read, the span stays whole, so that the error for the missing members
            # can name those that the sample has.
            if not read_spans:
                continue
            self.starts[place], _ = read_spans[0]
            _, self.stops[place] = read_spans[-1]
            for number, ((_, gap_start), (gap_stop, _)) in enumerate(pairwise(read_spans)):
                self._set_gap(number, place, gap_start, gap_stop)

    def _set_gap(self, number: int, place: int, start: int, stop: int) -> None:
        """Set the gap with a number in a sample's span, by its first block and the block after."""
        if number == len(self.gaps):
            no_blocks = array("I", bytes(len(self.starts) * self.starts.itemsize))
            self.gaps.append(Gaps(no_blocks, no_blocks[:]))
        starts, stops = self.gaps[number]
        starts[place] = start
        stops[place] = stop


def _read_spans(
    columns: Sequence[tuple[bool, Sequence[int | None]]],
    place: int,
    begin: int,
) -> list[tuple[int, int]]:
    """Return the first block of the members that are read, and the block after them.

    Returns this for each group of members without large members between them that are not read.

    Args:
        columns: for each column of a row, whether its members are read, and their sizes.
        place: place of the sample in the row.
        begin: number of the sample's first block.
    """
    read_spans: list[tuple[int, int]] = []
    for is_read, sizes in columns:
        size_bytes = sizes[place]
        if size_bytes is None:
            continue  # the sample has no such member
        end = begin + _member_blocks(0, size_bytes)
        if is_read:
            start = begin
            if read_spans and begin - read_spans[-1][1] < _MIN_GAP_BLOCKS:
                start, _ = read_spans.pop()  # this member continues the last span
            read_spans.append((start, end))
        begin = end
    return read_spans


def key_hash(key: str) -> int:
    """Return a hash of a key (CRC-32), which is kept where keys would take too much memory."""
    return crc32(key.encode("utf-8", "surrogateescape"))
