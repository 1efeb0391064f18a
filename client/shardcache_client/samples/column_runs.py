"""Samples of a shard whose columns lie one after another, decoded column by column."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from shardcache.formats.format import RunDecoder
from shardcache.tarindex.tables import TarIndex
from shardcache_client.samples.slicing import FAILURES, Sample, SlicedColumn, cut, keys_between

# Limits of the samples that are decoded together, all of whose values are in memory.
_MAX_SAMPLES = 128
_MAX_BYTES = 64 * 1024
# With fewer samples, it is no faster than one by one.
_MIN_SAMPLES = 4


def cut_columns(
    tables: TarIndex,
    columns: Sequence[SlicedColumn | None],
    run_decoders: Sequence[RunDecoder | None],
    url: str,
    start: int,
    stop: int,
) -> Iterator[Sample]:
    """Yield the samples from number `start` to `stop`, the same as `cut` does.

    Args:
        tables: of the shard.
        columns: as for `cut`.
        run_decoders: of the same columns; None for those decoded value by value.
        url: of the shard.
    """
    sample_bytes = tables.header["size_bytes"] // max(1, len(tables))
    at_once = min(_MAX_SAMPLES, _MAX_BYTES // max(1, sample_bytes))
    if at_once < _MIN_SAMPLES:
        yield from cut(tables, columns, url, start, stop)
        return
    names = ["__key__", "__url__", *(column[0] for column in columns if column is not None)]
    for first in range(start, stop, at_once):
        last = min(first + at_once, stop)
        values = _values(tables, columns, run_decoders, first, last)
        if values is None:
            yield from cut(tables, columns, url, first, last)
            continue
        for row in zip(keys_between(tables, first, last), repeat(url), *values):
            yield dict(zip(names, row, strict=True))


def _values(
    tables: TarIndex,
    columns: Sequence[SlicedColumn | None],
    run_decoders: Sequence[RunDecoder | None],
    start: int,
    stop: int,
) -> list[Sequence[Any]] | None:
    """Return the values of each column that is read; None to cut the samples one by one."""
    width = len(columns)
    count = stop - start
    first = tables.member_ends[start - 1] if start else 0
    last = tables.member_ends[stop - 1]
    members_of_each = array("I", range(width)).tobytes()
    if tables.extension_ids[first:last].tobytes() != members_of_each * count:
        return None  # some have no value of a column
    if not tables.faults.keys().isdisjoint(range(start, stop)):
        return None
    found: list[Sequence[Any]] = []
    try:
        for nth, column in enumerate(columns):
            if column is None:
                continue
            starts = tables.starts[first + nth : last : width].tolist()
            ends = tables.ends[first + nth : last : width].tolist()
            found.append(_values_of(column, run_decoders[nth], starts, ends))
    except FAILURES:
        return None  # one by one, the sample that has the fault raises its error
    return found


def _values_of(
    column: SlicedColumn, decode_run: RunDecoder | None, starts: list[int], ends: list[int]
) -> Sequence[Any]:
    """Return the values of a column, given where they lie."""
    _, data, decode = column
    if decode_run is not None and starts[1:] == ends[:-1]:
        begin = starts[0]
        values = decode_run(data[begin : ends[-1]], [end - begin for end in ends])
        if len(values) == len(ends):
            return values
    cells = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    return cells if decode is None else [decode(cell) for cell in cells]
