"""Tables as an input: each row of parquet files, or of Hugging Face's datasets, becomes a sample.

Rows are read in blocks, since both formats read many rows at a time: a row group of a parquet file,
or some thousand rows of a dataset. `member_columns` makes the samples. The module needs pyarrow.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardcache.errors import ConfigError, InputError
from shardcache.writing.member_columns import MemberColumn, columns_of, samples, sizes
from shardcache.writing.sample_tar import Sample
from shardcache.writing.sources import HUB, InputFile

if TYPE_CHECKING:
    import datasets

_BLOCK_ROWS = 1024  # number of rows that are read at a time


class _RowBlocks(ABC):
    """The common part of the sources in this module: rows in blocks.

    A sample's key is its row's number in the input. With a seed, the blocks are read in random
    order, and so are the rows of each block, which is in memory as a whole then. The position of a
    sample is two numbers in the order of reading: the place of its block among all blocks, and that
    of its row in the block.
    """

    def __init__(self, blocks: list[range], seed: int | None) -> None:
        """Take the blocks in the order of the input.

        Args:
            blocks: for each block, the numbers of its rows.
            seed: seed of a random order; None for the order of the input.
        """
        self._blocks = blocks
        self._seed = seed
        if seed is not None:
            random.Random(seed).shuffle(self._blocks)

    def positions(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield size and position of each sample, as `Source.positions`."""
        for place in range(len(self._blocks)):
            row = 0
            for columns, rows, _ in self._batches(place):
                for size_bytes in sizes(rows, columns):
                    yield size_bytes, (place, row)
                    row += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples between two positions, as `Source.read`."""
        first_place, first_row = first
        last_place, last_row = last
        for place in range(first_place, last_place + 1):
            # The range of rows to read, counted from the first row of the next batch.
            start = first_row if place == first_place else 0
            stop = last_row + 1 if place == last_place else len(self._blocks[place])
            for columns, rows, numbers in self._batches(place):
                begin = min(start, len(numbers))
                end = min(stop, len(numbers))
                yield from samples(rows.slice(begin, end - begin), columns, numbers[begin:end])
                start -= begin
                stop -= end
                if stop == 0:
                    break

    @abstractmethod
    def _rows(
        self, block: range, *, at_once: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        """Yield the columns to write, and rows of a block, in the order of the table.

        Args:
            block: numbers of the block's rows.
            at_once: True to yield all rows of the block together, False to yield some at a time.
        """

    def _batches(self, place: int) -> Iterator[tuple[list[MemberColumn], pa.Table, Sequence[int]]]:
        """Yield the rows of the block at a place, in the order of reading.

        Each batch is the columns to write, some rows, and the numbers of these rows in the input.
        """
        block = self._blocks[place]
        if self._seed is None:
            first = block.start
            for columns, rows in self._rows(block, at_once=False):
                yield columns, rows, range(first, first + rows.num_rows)
                first += rows.num_rows
            return
        order = list(range(len(block)))
        random.Random(f"{self._seed}/{block.start}").shuffle(order)
        for columns, rows in self._rows(block, at_once=True):
            for start in range(0, len(order), _BLOCK_ROWS):
                chosen = order[start : start + _BLOCK_ROWS]
                yield columns, rows.take(chosen), [block[row] for row in chosen]


class Parquet(_RowBlocks):
    """The rows of parquet files, counted from 0 through all files. A block is a row group."""

    def __init__(
        self,
        files: Sequence[Sequence[Any]],
        columns: Mapping[str, str],
        seed: int | None,
    ) -> None:
        self._wanted_columns = columns
        # For each row group, by the numbers of its rows: its file, and the group's number in the
        # file.
        self._groups: dict[range, tuple[InputFile, int]] = {}
        number = 0
        for values in files:
            file = InputFile(*values)
            with _opened(file) as parquet:
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    self._groups[range(number, number + rows)] = file, group
                    number += rows
        super().__init__(list(self._groups), seed)

    def _rows(
        self, block: range, *, at_once: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        file, group = self._groups[block]
        with _opened(file) as parquet:
            columns = columns_of(parquet.schema_arrow, self._wanted_columns, file.path)
            names = [column.name for column in columns]
            if at_once:
                yield columns, parquet.read_row_group(group, columns=names)
                return
            for batch in parquet.iter_batches(_BLOCK_ROWS, row_groups=[group], columns=names):
                yield columns, pa.Table.from_batches([batch])


@contextmanager
def _opened(file: InputFile) -> Iterator[pq.ParquetFile]:
    """Open a parquet file. Raises InputError if it is not readable, or has changed."""
    with file.open() as content:
        try:
            with pq.ParquetFile(content) as parquet:
                yield parquet
        except (pa.ArrowException, OSError) as exn:
            raise InputError(
                f"not a readable parquet file ({exn})",
                url=file.path,
                remedy="write the file again, or leave it out",
            ) from exn


class HuggingFace(_RowBlocks):
    """The rows of one split of a Hugging Face dataset, read from mapped Arrow files.

    Args:
        name: `hf:NAME` for a dataset on the hub, or a folder that `save_to_disk` has written.
        split: the split to read; None for a dataset without splits.
        columns: the extension of each column to write; empty for all columns.
        seed: seed of a random order; None for the order of the dataset.

    Attributes:
        identity: the dataset's fingerprint, which changes with its content.
    """

    def __init__(
        self,
        name: str,
        split: str | None,
        columns: Mapping[str, str],
        seed: int | None,
    ) -> None:
        dataset = _load_split(name, split)
        self.identity = str(dataset._fingerprint)  # noqa: SLF001  # no public attribute
        rows = dataset.with_format("arrow")
        self._columns = columns_of(rows.features.arrow_schema, columns, name)
        self._dataset = rows.select_columns([column.name for column in self._columns])
        numbers = range(len(self._dataset))
        blocks = [numbers[first : first + _BLOCK_ROWS] for first in numbers[::_BLOCK_ROWS]]
        super().__init__(blocks, seed)

    def _rows(
        self, block: range, *, at_once: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        # `at_once` does not matter, since these blocks are small enough to be read as a whole.
        yield self._columns, self._dataset[block.start : block.stop]


def _load_split(name: str, split: str | None) -> datasets.Dataset:
    """Load one split of a dataset. Raises InputError, ConfigError for a missing or wrong split."""
    import datasets  # here, since only users of such datasets need it

    is_saved = not name.startswith(HUB)
    try:
        if is_saved:
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name.removeprefix(HUB), split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as exn:
        raise InputError(
            f"cannot load the dataset ({exn})",
            url=name,
            remedy="check its name and --split",
        ) from exn
    if isinstance(dataset, datasets.DatasetDict):
        if split in dataset:
            return dataset[split]
        raise ConfigError(
            f"the dataset has several splits, and {split or 'none'} is chosen",
            url=name,
            remedy=f"choose one with --split: {', '.join(dataset)}",
        )
    # A saved dataset without splits may be one split of another dataset, and then has its name.
    if is_saved and split not in (None, str(dataset.split)):
        raise ConfigError(
            f"the dataset has no split {split}",
            url=name,
            remedy="omit --split, which writes all of the dataset, or name another folder",
        )
    return dataset
