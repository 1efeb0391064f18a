"""Parquet files: each row becomes a sample. Needs pyarrow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardcache.errors import InputError
from shardcache.writing.plan.samples import Sample
from shardcache.writing.sources.columns import Column, Rows, columns_of, samples, sizes
from shardcache.writing.sources.source import open_unchanged

_BATCH_ROWS = 1024


class Parquet:
    """The rows of parquet files, one after another; a position is (place of the row group, row in it).

    With a seed, the row groups come in random order, and the rows of each, too; each is then in memory as a whole. A
    sample's key is its row's number, counted from 0 through all files, whatever the order.

    Args:
        files: facts of each file.
        columns: column → extension; all columns if empty.
        seed: the seed of the order, or None for that of the files.
    """

    def __init__(self, files: Sequence[Sequence[Any]], columns: Mapping[str, str], seed: int | None) -> None:
        self._files = files
        self._wanted = columns
        self._seed = seed
        self._groups: list[tuple[int, int, int, int]] = []  # file, row group, number of its first row, rows
        number = 0
        for file, fact in enumerate(files):
            with _opened(fact) as parquet:
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    self._groups.append((file, group, number, rows))
                    number += rows
        if seed is not None:
            random.Random(seed).shuffle(self._groups)

    def positions(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """As `Source.positions`."""
        for place in range(len(self._groups)):
            row = 0
            for batch, columns, _ in self._batches(place, 0):
                for size_bytes in sizes(batch, columns):
                    yield size_bytes, (place, row)
                    row += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """As `Source.read`."""
        for place in range(first[0], last[0] + 1):
            row = first[1] if place == first[0] else 0
            stop = last[1] + 1 if place == last[0] else self._groups[place][3]
            for batch, columns, numbers in self._batches(place, row):
                used = min(batch.num_rows, stop - row)
                yield from samples(batch.slice(0, used), columns, numbers[:used])
                row += used
                if row == stop:
                    break

    def _batches(self, place: int, skip: int) -> Iterator[tuple[Rows, list[Column], Sequence[int]]]:
        """Yield batches of a row group's rows, after the first `skip`, with their columns and the rows' numbers."""
        file, group, number, rows = self._groups[place]
        with _opened(self._files[file]) as parquet:
            columns = columns_of(parquet.schema_arrow, self._wanted, self._files[file][0])
            names = [column.name for column in columns]
            if self._seed is not None:
                order = list(range(rows))
                random.Random(f"{self._seed}/{number}").shuffle(order)
                table = parquet.read_row_group(group, columns=names)
                for start in range(skip, rows, _BATCH_ROWS):
                    chosen = order[start : start + _BATCH_ROWS]
                    yield table.take(chosen), columns, [number + row for row in chosen]
                return
            at = 0
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
                behind = at + batch.num_rows
                if behind > skip:
                    dropped = max(0, skip - at)
                    yield batch.slice(dropped), columns, range(number + at + dropped, number + behind)
                at = behind


@contextmanager
def _opened(fact: Sequence[Any]) -> Iterator[pq.ParquetFile]:
    with open_unchanged(fact) as file:
        try:
            with pq.ParquetFile(file) as parquet:
                yield parquet
        except (pa.ArrowException, OSError) as exn:
            raise InputError(
                f"not a readable parquet file ({exn})", url=fact[0], remedy="write the file again, or leave it out"
            ) from exn
