"""Samples of small values, decoded by one call for one whole sample or for several.

A row is a sample of a format that stores each sample in one piece, such as a line of JSON Lines.
One call of the format's decoder for many rows costs far less than a call for each value.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from shardcache.shared.formats.format import RowsDecoder
from shardcache.shared.tarindex.tables import TarIndex
from shardcache_client.samples.slicing import (
    FAILURES,
    Sample,
    SlicedColumn,
    Slices,
    cut,
    cutter,
    has_bad_sample,
    keys_in_order,
    members_between,
)

# Samples whose members are larger than this on average are decoded member by member. Parsing such a
# sample as a whole takes longer for its bytes than it saves in calls.
_SMALL_BYTES = 512

# Size and number of consecutive samples that are decoded by one call. The limits are low, so that
# the values stay in the processor's nearest cache until most of them are dropped again.
_ROWS_BYTES = 8 * 1024
_MAX_ROWS = 64


class RowRuns:
    """Reads the samples of a shard whose format can decode whole samples.

    If values are large, or a sample cannot be decoded by one call, each value is decoded by itself.

    The offsets of members in `tables` may be unchecked, because checking all of them takes time.
    Decoding rows checks the offsets that it uses. Decoding single values does not, so
    `check_members` is called before.

    Args:
        tables: index of the shard. The members of each sample have the order of their offsets.
        decode_rows: decodes whole samples.
        data: the shard's bytes.
        url: url of the shard.
        make_columns: returns the columns; see `cut`. It is called if a value is decoded by itself.
        check_members: raises CorruptShardError if a member lies outside of the shard.
    """

    def __init__(
        self,
        tables: TarIndex,
        decode_rows: RowsDecoder,
        data: Slices,
        url: str,
        make_columns: Callable[[], Sequence[SlicedColumn | None]],
        check_members: Callable[[], None],
    ) -> None:
        self._tables = tables
        self._decode_rows = decode_rows
        self._data = data
        self._url = url
        self._make_columns = make_columns
        self._check_members = check_members

    def cutter(self) -> Callable[..., Sample]:
        """Return a function that returns any sample by its number; see `slicing.cutter`.

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
            # The decoder makes a new sample. It cannot add members to another one.
            if sample is not None:
                return self._cut_one(number, sample)
            first_member = member_ends[number - 1] if number else 0
            end_member = member_ends[number]
            # A sample without members may be a bad sample, for which `_cut_one` raises an error.
            if first_member == end_member:
                return self._cut_one(number)
            begin = starts[first_member]
            end = ends[end_member - 1]
            is_small = end - begin <= (end_member - first_member) * _SMALL_BYTES
            if not is_small or not begin <= end <= size_bytes:
                return self._cut_one(number)
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

    @cached_property
    def _cut_one(self) -> Callable[..., Sample]:
        """Function that returns any sample by its number, decoded value by value."""
        return cutter(self._tables, self._columns, self._url)

    @cached_property
    def _columns(self) -> Sequence[SlicedColumn | None]:
        """The columns; see `cut`. Raises CorruptShardError for members outside of the shard."""
        self._check_members()
        return self._make_columns()

    def in_order(self, start: int, stop: int) -> Iterator[Sample]:
        """Yield the samples from number `start` to `stop`; see `cutter` for errors."""
        tables = self._tables
        url = self._url
        at_once = self._rows_at_once(start, stop)
        keys = keys_in_order(tables, start, stop)
        for first in range(start, stop, at_once):
            end = min(first + at_once, stop)
            rows = self._decode(first, end)
            if rows is None:
                # `cut` reads the keys of these samples itself, so the iterator of keys is replaced
                # by one that begins after them.
                yield from cut(tables, self._columns, url, first, end)
                keys = keys_in_order(tables, end, stop)
                continue
            # With `strict`, `zip` would take a key after the last row, which is the key of the next
            # sample.
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
        first_member, end_member = members_between(tables, start, stop)
        members = end_member - first_member
        if not members:
            return 1
        size_bytes = tables.ends[end_member - 1] - tables.starts[first_member]
        if size_bytes > members * _SMALL_BYTES:
            return stop - start
        at_once = _ROWS_BYTES * (stop - start) // max(1, size_bytes)
        return min(max(1, at_once), _MAX_ROWS)

    def _decode(self, start: int, stop: int) -> list[Sample] | None:
        """Return samples without keys and urls; None if each value has to be decoded by itself."""
        tables = self._tables
        first_member, end_member = members_between(tables, start, stop)
        # `cut` raises the error of a bad sample.
        if first_member == end_member or has_bad_sample(tables, start, stop):
            return None
        begin = tables.starts[first_member]
        end = tables.ends[end_member - 1]
        are_small = end - begin <= (end_member - first_member) * _SMALL_BYTES
        if not are_small or not begin <= end <= tables.header["size_bytes"]:
            return None
        try:
            rows = self._decode_rows(tables.extension_ids[first_member], self._data[begin:end])
        except FAILURES:
            return None
        # A sample without members may be missing from the rows. The other rows would then get the
        # keys of other samples.
        if len(rows) != stop - start:
            return None
        return rows
