"""Samples of a shard whose columns lie one after another, decoded column by column.

A cached Parquet file, for example, is a stream of Arrow's record batches, which have the values of
one column for many rows together. A run is consecutive samples whose values of each column lie
directly one after another in the file. All values of a column in a run are decoded by one call,
which costs far less than a call for each value.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from shardcache.shared.formats.format import RunDecoder
from shardcache.shared.tarindex.number_tables import NumberTable
from shardcache.shared.tarindex.tables import TarIndex
from shardcache_client.samples.slicing import (
    FAILURES,
    Sample,
    SlicedColumn,
    cut,
    has_all_columns,
    has_bad_sample,
    keys_between,
    members_between,
)

# Maximum number and size of the samples that are decoded together, as all of their values are in
# memory at the same time.
_MAX_SAMPLES = 128
_MAX_BYTES = 64 * 1024
# Fewer samples than this are decoded one by one, since decoding them together is not faster.
_MIN_SAMPLES = 4


class ColumnRuns:
    """Reads the samples of a shard that has columns with a run decoder.

    If a sample lacks a value, or a value cannot be decoded, samples are cut one by one.

    The offsets of members in `tables` may be unchecked, because checking all of them takes time.
    Decoding a run checks the offsets that it uses. Cutting samples one by one does not, so
    `check_members` is called before.

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
        self._shard_bytes: int = tables.header["size_bytes"]

    def in_order(self, start: int, stop: int) -> Iterator[Sample]:
        """Yield the samples from number `start` to `stop`, the same as `cut` does.

        Raises the errors of `cut`, and CorruptShardError if a member lies outside of the shard.
        """
        average_bytes = self._shard_bytes // max(1, len(self._tables))
        at_once = min(_MAX_SAMPLES, _MAX_BYTES // max(1, average_bytes))
        if at_once < _MIN_SAMPLES:
            yield from self._cut_one_by_one(start, stop)
            return
        first = start
        while first < stop:
            max_end = min(first + at_once, stop)
            run_end = self._end_of_run(first, max_end)
            samples: list[Sample] | None = None
            if run_end - first >= _MIN_SAMPLES:
                samples = self._decode_samples(first, run_end)

            # If the run is short or cannot be decoded, all samples up to `max_end` are cut.
            if samples is None:
                yield from self._cut_one_by_one(first, max_end)
                first = max_end
            else:
                yield from samples
                first = run_end

    def _cut_one_by_one(self, start: int, stop: int) -> Iterator[Sample]:
        """Return samples, each cut by itself. Raises the errors of `in_order`."""
        self._check_members()
        return cut(self._tables, self._columns, self._url, start, stop)

    def _end_of_run(self, start: int, stop: int) -> int:
        """Return the end of the run that begins with the sample `start`, at most `stop`.

        Returns `start` if there is no run, or if a sample up to `stop` is bad or lacks a value.
        """
        tables = self._tables
        width = len(self._columns)  # number of members of each sample
        if not has_all_columns(tables, width, start, stop) or has_bad_sample(tables, start, stop):
            return start
        # Each value has to begin where the previous sample's value in the same column ends. That
        # value's member is `width` places before it in the tables.
        first_member, end_member = members_between(tables, start, stop)
        next_starts = tables.starts[first_member + width : end_member]
        ends = tables.ends[first_member : end_member - width]
        if next_starts.tobytes() == ends.tobytes():
            return stop
        # The run ends where the format's next batch of rows begins. All columns of a batch end at
        # the same sample, so only the first column is searched. This method then compares the other
        # columns in the shorter run.
        first_column = zip(next_starts[::width], ends[::width], strict=True)
        for number, (next_start, end) in enumerate(first_column, start + 1):
            if next_start != end:
                return self._end_of_run(start, number)
        return start

    def _decode_samples(self, start: int, stop: int) -> list[Sample] | None:
        """Return the samples of a run; None if they have to be cut one by one."""
        tables = self._tables
        width = len(self._columns)  # number of members of each sample
        first_member, end_member = members_between(tables, start, stop)
        url = self._url
        samples: list[Sample] = [
            {"__key__": key, "__url__": url} for key in keys_between(tables, start, stop)
        ]
        try:
            for nth, column in enumerate(self._columns):
                if column is None:
                    continue
                name, _, _ = column
                begin = tables.starts[first_member + nth]
                ends = tables.ends[first_member + nth : end_member : width]
                values = self._decode_column(column, self._run_decoders[nth], begin, ends)
                for sample, value in zip(samples, values, strict=True):
                    sample[name] = value
        except FAILURES:
            # The samples are then cut one by one, and the faulty sample raises its own error.
            return None
        return samples

    def _decode_column(
        self,
        column: SlicedColumn,
        decode_run: RunDecoder | None,
        begin: int,
        ends: NumberTable,
    ) -> Sequence[Any]:
        """Return the values of a column in a run.

        Raises ValueError for values outside of the shard, and the errors of the decoders.

        Args:
            column: the column.
            decode_run: decoder of many values at once; None to decode value by value.
            begin: offset in the shard at which the first value begins.
            ends: offset at which each value ends and the next one begins.
        """
        _, data, decode = column
        end = ends[-1]
        # The offsets are unchecked: those of a damaged index may be any numbers.
        if not begin <= ends[0] <= end <= self._shard_bytes:
            raise ValueError("values outside of the shard")
        if decode_run is not None:
            return decode_run(data[begin:end], begin, ends)
        stops = ends.tolist()
        if stops != sorted(stops):
            raise ValueError("values outside of the shard")
        cells = [data[start:stop] for start, stop in pairwise((begin, *stops))]
        if decode is None:
            return cells
        return [decode(cell) for cell in cells]
