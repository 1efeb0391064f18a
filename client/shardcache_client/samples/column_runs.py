"""Samples of a shard whose columns lie one after another, decoded column by column.

A cached Parquet file, for example, is a stream of Arrow's record batches, which have the values of
one column for many rows together. A run is consecutive samples whose values lie like this, without
gaps. All values of a column in a run are decoded by one call, which costs far less than a call for
each value.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from shardcache.formats.format import RunDecoder
from shardcache.tarindex.number_tables import NumberTable
from shardcache.tarindex.tables import TarIndex
from shardcache_client.samples.slicing import FAILURES, Sample, SlicedColumn, cut, keys_between

# Maximum number and size of the samples that are decoded together, as all of their values are in
# memory at the same time.
_MAX_SAMPLES = 128
_MAX_BYTES = 64 * 1024
# Fewer samples than this are decoded one by one, since decoding them together is not faster.
_MIN_SAMPLES = 4


class ColumnRuns:
    """The samples of a shard in file order.

    `MappedShard` uses this class for a shard with a column that has a run decoder.

    If a sample lacks a value, or a value cannot be decoded, samples are cut one by one. Only this
    needs the places of all members to be checked before: decoding a run checks the places that it
    uses. So the members of `tables` may be unchecked; `check_members` is called before samples are
    cut one by one.

    Args:
        tables: index of the shard.
        columns: the columns; see `cut`.
        run_decoders: for each column, a decoder of many values at once; None for a column that is
            decoded value by value.
        url: url of the shard.
        check_members: raises CorruptShardError if a member lies outside of the shard.
    """

    def __init__(
        self,
        tables: TarIndex,
        columns: Sequence[SlicedColumn | None],
        run_decoders: Sequence[RunDecoder | None],
        url: str,
        check_members: Callable[[], None],
    ) -> None:
        self._tables = tables
        self._columns = columns
        self._run_decoders = run_decoders
        self._url = url
        self._check_members = check_members
        self._size_bytes: int = tables.header["size_bytes"]

    def in_order(self, start: int, stop: int) -> Iterator[Sample]:
        """Yield the samples from number `start` to `stop`, the same as `cut` does.

        Raises the errors of `cut`, and CorruptShardError if a member lies outside of the shard.
        """
        sample_bytes = self._size_bytes // max(1, len(self._tables))  # the average
        at_once = min(_MAX_SAMPLES, _MAX_BYTES // max(1, sample_bytes))
        if at_once < _MIN_SAMPLES:
            yield from self._one_by_one(start, stop)
            return
        first = start
        while first < stop:
            max_end = min(first + at_once, stop)
            run_end = self._end_of_run(first, max_end)
            samples: list[Sample] | None = None
            if run_end - first >= _MIN_SAMPLES:
                samples = self._together(first, run_end)

            # In place of a short run, or one that cannot be decoded together, all samples up to
            # `max_end` are cut one by one.
            if samples is None:
                yield from self._one_by_one(first, max_end)
                first = max_end
            else:
                yield from samples
                first = run_end

    def _one_by_one(self, start: int, stop: int) -> Iterator[Sample]:
        """Return samples, each cut by itself. Raises the errors of `in_order`."""
        self._check_members()
        return cut(self._tables, self._columns, self._url, start, stop)

    def _end_of_run(self, start: int, stop: int) -> int:
        """Return the end of the run of samples that begins with `start`, at most `stop`.

        Each sample of a run has a value in every column, directly after the value of the previous
        sample. Returns `start` if there is no such run, or if a sample is bad.
        """
        tables = self._tables
        width = len(self._columns)
        first_member = tables.member_ends[start - 1] if start else 0
        end_member = tables.member_ends[stop - 1]
        # A sample of a run has one member of each column, in the order of the columns. Comparing
        # bytes is faster than a loop over the samples.
        members_of_each = array("I", range(width)).tobytes()
        members_of_run = members_of_each * (stop - start)
        if tables.extension_ids[first_member:end_member].tobytes() != members_of_run:
            return start
        if tables.faults and not tables.faults.keys().isdisjoint(range(start, stop)):
            return start
        # Each member of a sample but the first has to begin where the previous sample's member of
        # the same column ends. That member is `width` places before it in the tables.
        next_starts = tables.starts[first_member + width : end_member]
        ends = tables.ends[first_member : end_member - width]
        if next_starts.tobytes() == ends.tobytes():
            return stop
        # The run ends where the format's next batch of rows begins. All columns of a batch end at
        # the same sample, so only the first column is searched.
        of_first_column = zip(next_starts[::width], ends[::width], strict=True)
        for number, (next_start, end) in enumerate(of_first_column, start + 1):
            # In the shorter run, all columns are compared.
            if next_start != end:
                return self._end_of_run(start, number)
        return start

    def _together(self, start: int, stop: int) -> list[Sample] | None:
        """Return the samples of a run; None to cut them one by one."""
        tables = self._tables
        width = len(self._columns)
        first_member = tables.member_ends[start - 1] if start else 0
        end_member = tables.member_ends[stop - 1]
        url = self._url
        samples: list[Sample] = [
            {"__key__": key, "__url__": url} for key in keys_between(tables, start, stop)
        ]
        try:
            for nth, column in enumerate(self._columns):
                if column is None:
                    continue
                name, _, _ = column
                starts = tables.starts[first_member + nth : end_member : width]
                ends = tables.ends[first_member + nth : end_member : width]
                values = self._values_of(column, self._run_decoders[nth], starts, ends)
                for sample, value in zip(samples, values, strict=True):
                    sample[name] = value
        except FAILURES:
            # The samples are then cut one by one, and the faulty sample raises its own error.
            return None
        return samples

    def _values_of(
        self,
        column: SlicedColumn,
        decode_run: RunDecoder | None,
        starts: NumberTable,
        ends: NumberTable,
    ) -> Sequence[Any]:
        """Return the values of a column in a run.

        Raises ValueError for values outside of the shard, and the errors of the decoders.

        Args:
            column: the column.
            decode_run: decoder of many values at once; None to decode value by value.
            starts: offset in the shard at which each value begins.
            ends: offset at which each value ends.
        """
        _, data, decode = column
        begin = starts[0]
        end = ends[-1]
        # The members may be unchecked, so numbers of a damaged index must not be relied on.
        if not begin <= ends[0] <= end <= self._size_bytes:
            raise ValueError("values outside of the shard")
        if decode_run is not None:
            return decode_run(data[begin:end], begin, ends)
        # The values lie one after another, so each value begins where the value before it ends.
        stops = ends.tolist()
        if stops != sorted(stops):
            raise ValueError("values outside of the shard")
        cells = [data[start:stop] for start, stop in pairwise((begin, *stops))]
        if decode is None:
            return cells
        return [decode(cell) for cell in cells]
