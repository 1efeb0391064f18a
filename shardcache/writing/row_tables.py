"""Tables as an input: each row of parquet files, or of Hugging Face's datasets, becomes a sample.

Rows are read in blocks, since both formats read many rows at a time. A block is a row group of a
parquet file, or a thousand rows of a dataset. The rows of a block come in batches, so that a large
row group need not be in memory as a whole. `member_columns` makes the samples.

The module needs pyarrow.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from shardcache.shared.exceptions import ConfigError, InputError
from shardcache.writing.member_columns import (
    MemberColumn,
    columns_of,
    samples_of_rows,
    sizes_of_rows,
)
from shardcache.writing.sample_tar import Sample
from shardcache.writing.sources import HUB_PREFIX, InputFile

if TYPE_CHECKING:
    import datasets

_BATCH_ROWS = 1024  # maximum number of rows of a batch, and of a dataset's block


class _Batch(NamedTuple):
    """Some rows of a block, in the order in which they are read.

    Attributes:
        columns: the columns to write.
        rows: the rows.
        numbers: the number of each row in the input.
    """

    columns: list[MemberColumn]
    rows: pa.Table
    numbers: Sequence[int]

    def samples(self, begin: int, end: int) -> Iterator[Sample]:
        """Yield the samples of the rows from place `begin` to before place `end` in the batch."""
        rows = self.rows.slice(begin, end - begin)
        yield from samples_of_rows(rows, self.columns, self.numbers[begin:end])


class _RowBlocks(ABC):
    """The common part of the sources in this module: rows in blocks.

    A sample's key is its row's number in the input. With a seed, the blocks are read in random
    order, and so are the rows of each block, which is then in memory as a whole. A sample's
    position is (block place, row place): the place of its block among all blocks, and the place of
    its row in the block. Both are places in the order of reading.
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

    def sized_positions(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield size and position of each sample, as `Source.sized_positions`."""
        for block_place in range(len(self._blocks)):
            row_place = 0
            for batch in self._batches(block_place):
                for size_bytes in sizes_of_rows(batch.rows, batch.columns):
                    yield size_bytes, (block_place, row_place)
                    row_place += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples between two positions, as `Source.read`."""
        first_block, first_row = first
        last_block, last_row = last
        for block_place in range(first_block, last_block + 1):
            start = first_row if block_place == first_block else 0
            stop = last_row + 1 if block_place == last_block else len(self._blocks[block_place])
            batch_start = 0  # place of the batch's first row in the block
            for batch in self._batches(block_place):
                batch_stop = batch_start + len(batch.numbers)
                begin = max(start, batch_start)
                end = min(stop, batch_stop)
                if begin < end:
                    yield from batch.samples(begin - batch_start, end - batch_start)
                batch_start = batch_stop
                if batch_stop >= stop:
                    break

    def _batches(self, block_place: int) -> Iterator[_Batch]:
        """Yield the rows of a block in the order of reading."""
        block = self._blocks[block_place]
        if self._seed is None:
            first = block.start
            for columns, rows in self._tables(block, whole=False):
                yield _Batch(columns, rows, range(first, first + rows.num_rows))
                first += rows.num_rows
            return
        order = list(range(len(block)))
        random.Random(f"{self._seed}/{block.start}").shuffle(order)
        for columns, rows in self._tables(block, whole=True):
            for start in range(0, len(order), _BATCH_ROWS):
                chosen = order[start : start + _BATCH_ROWS]
                yield _Batch(columns, rows.take(chosen), [block[row] for row in chosen])

    @abstractmethod
    def _tables(
        self, block: range, *, whole: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        """Yield the columns to write, and the rows of a block, in the order of the input.

        Args:
            block: numbers of the block's rows.
            whole: True to yield all rows of the block together, False to yield some at a time.
        """


class Parquet(_RowBlocks):
    """The rows of parquet files, counted from 0 through all files. A block is a row group.

    Args:
        files: the files, each as the values of an `InputFile`.
        columns: the extension of each column to write; empty for all columns.
        seed: seed of a random order; None for the order of the files.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Any]],
        columns: Mapping[str, str],
        seed: int | None,
    ) -> None:
        self._extensions = columns
        # By the numbers of its rows, the place of each row group: its file, and its number in it.
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

    def _tables(
        self, block: range, *, whole: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        file, group = self._groups[block]
        with _opened(file) as parquet:
            columns = columns_of(parquet.schema_arrow, self._extensions, file.path)
            names = [column.name for column in columns]
            if whole:
                yield columns, parquet.read_row_group(group, columns=names)
                return
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
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
        blocks = [numbers[first : first + _BATCH_ROWS] for first in numbers[::_BATCH_ROWS]]
        super().__init__(blocks, seed)

    def _tables(
        self, block: range, *, whole: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        # `whole` does not matter, since these blocks are no larger than a batch.
        yield self._columns, self._dataset[block.start : block.stop]


def _load_split(name: str, split: str | None) -> datasets.Dataset:
    """Load one split of a dataset. Raises InputError, ConfigError for a missing or wrong split."""
    import datasets  # here, since only users of such datasets need it

    is_saved = not name.startswith(HUB_PREFIX)
    try:
        if is_saved:
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name.removeprefix(HUB_PREFIX), split=split)
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
    # A saved dataset without splits may itself be a split of another dataset. It then knows the
    # name of that split, which the user may give.
    if is_saved and split not in (None, str(dataset.split)):
        raise ConfigError(
            f"the dataset has no split {split}",
            url=name,
            remedy="omit --split, which writes all of the dataset, or name another folder",
        )
    return dataset
