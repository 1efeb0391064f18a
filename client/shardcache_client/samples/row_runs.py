"""Samples of small values, decoded by one call for all values of a sample or of several samples.

A row is a sample of a format that stores whole samples together, such as a line of JSON Lines. One
call of the format's decoder for many rows costs far less than a call for each value.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from shardcache.formats.format import RowsDecoder
from shardcache.tarindex.tables import TarIndex
from shardcache_client.samples.slicing import (
    FAILURES,
    Sample,
    SlicedColumn,
    Slices,
    cut,
    cutter,
    keys_in_order,
)

# Samples whose members are larger than this on average are decoded member by member. Parsing such a
# sample as a whole takes longer for its bytes than it saves in calls.
_SMALL_BYTES = 512

# Size and number of consecutive samples that are decoded by one call. They are so few that their
# values stay in the processor's nearest cache until most of them are dropped again.
_ROWS_BYTES = 8 * 1024
_MAX_ROWS = 64


class Rows:
    """The samples of a shard whose values can be decoded all at once.

    If values are large, or a sample cannot be decoded by one call, each value is decoded by itself.
    Only this needs the places of all members to be checked before: decoding rows checks the places
    that it uses. So the members of `tables` may be unchecked; `check_members` is called before any
    value is decoded by itself.

    Args:
        tables: index of the shard, whose samples have their members in the order of its bytes.
        decode_rows: decodes whole samples.
        data: the shard's bytes.
        url: url of the shard.
        columns: returns the columns; see `cut`. It is called if a value is decoded by itself.
        check_members: raises CorruptShardError if a member lies outside of the shard.
    """

    def __init__(
        self,
        tables: TarIndex,
        decode_rows: RowsDecoder,
        data: Slices,
        url: str,
        columns: Callable[[], Sequence[SlicedColumn | None]],
        check_members: Callable[[], None],
    ) -> None:
        self._tables = tables
        self._decode_rows = decode_rows
        self._data = data
        self._url = url
        self._make_columns = columns
        self._check_members = check_members

    @cached_property
    def _columns(self) -> Sequence[SlicedColumn | None]:
        """The columns; see `cut`. Raises CorruptShardError for members outside of the shard."""
        self._check_members()
        return self._make_columns()

    @cached_property
    def _cut_one(self) -> Callable[..., Sample]:
        """Function that returns any sample by its number, decoded value by value."""
        return cutter(self._tables, self._columns, self._url)

    def cutter(self) -> Callable[..., Sample]:
        """Return a function that returns any sample by its number, or adds its members to another.

        The function raises the errors of `cut`, and CorruptShardError if a member lies outside of
        the shard.
        """
        # Variables of a closure cost less than attributes and further calls, and a shuffled reader
        # calls the function for each sample.
        starts = self._tables.starts
        ends = self._tables.ends
        extension_ids = self._tables.extension_ids
        member_ends = self._tables.member_ends
        key_ends = self._tables.key_ends
        keys = self._tables.keys
        size_bytes = self._tables.header["size_bytes"]
        decode_rows = self._decode_rows
        data = self._data
        url = self._url

        def cut_row(number: int, sample: Sample | None = None) -> Sample:
            """Return a sample by its number, or add its members to `sample` and return that."""
            first_member = member_ends[number - 1] if number else 0
            end_member = member_ends[number]
            # A row is always a new sample. Members are added to another one value by value.
            if sample is not None:
                return self._cut_one(number, sample)
            # A sample without members may also be a bad sample, for which `_cut_one` raises.
            if first_member == end_member:
                return self._cut_one(number)
            begin = starts[first_member]
            end = ends[end_member - 1]
            is_small = end - begin <= (end_member - first_member) * _SMALL_BYTES
            if not is_small or not begin <= end <= size_bytes:
                return self._cut_one(number)
            # The call returns one row, for the bytes from the sample's first member to its last.
            # The decoder has to know the column of the first.
            try:
                (row,) = decode_rows(extension_ids[first_member], data[begin:end])
            except FAILURES:
                # Decoding value by value raises an error that names the column.
                return self._cut_one(number)
            key_start = key_ends[number - 1] if number else 0
            row["__key__"] = str(keys[key_start : key_ends[number]], "utf-8", "surrogateescape")
            row["__url__"] = url
            return row

        return cut_row

    def in_order(self, start: int, stop: int) -> Iterator[Sample]:
        """Yield the samples from number `start` to `stop`; see `cutter` for errors."""
        tables = self._tables
        url = self._url
        at_once = self._rows_at_once(start, stop)
        keys = keys_in_order(tables, start, stop)
        for first in range(start, stop, at_once):
            end = min(first + at_once, stop)
            rows = self._rows(first, end)
            if rows is None:
                # `cut` reads the keys of these samples itself, so the iterator of keys is replaced
                # by one that begins after them.
                yield from cut(tables, self._columns, url, first, end)
                keys = keys_in_order(tables, end, stop)
                continue
            # Not `strict`: `zip` would then take a further key after the last row, to see that none
            # is left. That key belongs to the next sample.
            for row, key in zip(rows, keys):  # noqa: B905
                row["__key__"] = key
                row["__url__"] = url
                yield row

    def _rows_at_once(self, start: int, stop: int) -> int:
        """Return the number of samples of average size to decode by one call.

        If the samples are large, the result is the number of all samples, because each value is
        then decoded by itself.
        """
        tables = self._tables
        first_member = tables.member_ends[start - 1] if start else 0
        end_member = tables.member_ends[stop - 1] if stop else 0
        members = end_member - first_member
        if not members:
            return 1
        size_bytes = tables.ends[end_member - 1] - tables.starts[first_member]
        if size_bytes > members * _SMALL_BYTES:
            return stop - start
        at_once = _ROWS_BYTES * (stop - start) // max(1, size_bytes)
        return min(max(1, at_once), _MAX_ROWS)

    def _rows(self, start: int, stop: int) -> list[Sample] | None:
        """Return samples without keys and urls; None to decode each value by itself."""
        tables = self._tables
        first_member = tables.member_ends[start - 1] if start else 0
        end_member = tables.member_ends[stop - 1]
        # If the samples have no members, they may be bad samples, for which `cut` raises.
        if first_member == end_member:
            return None
        begin = tables.starts[first_member]
        end = tables.ends[end_member - 1]
        are_small = end - begin <= (end_member - first_member) * _SMALL_BYTES
        if not are_small or not begin <= end <= tables.header["size_bytes"]:
            return None
        # If one of the samples is bad, they are cut one by one, which raises its error. A single
        # sample is good here: it has members, and bad samples have none.
        may_have_bad_one = tables.faults and stop - start > 1
        if may_have_bad_one and not tables.faults.keys().isdisjoint(range(start, stop)):
            return None
        try:
            rows = self._decode_rows(tables.extension_ids[first_member], self._data[begin:end])
        except FAILURES:
            return None
        # A sample without members may be missing from the rows. The other rows would then get the
        # keys of other samples.
        return rows if len(rows) == stop - start else None
