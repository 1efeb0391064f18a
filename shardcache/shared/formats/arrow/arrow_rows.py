"""Streams of Arrow's record batches, as which parquet files are cached: a row is a sample.

A cell is the value of a column in a row. A stream's buffers are not compressed, so that each cell
is a range of the file. The metadata of each column in Arrow's schema names the encoding of its
cells (`cell_values`). A column `__key__` has the keys of samples, and a column `__url__` is left
out. If a row has a null in a column, its sample has no cell of that column.

Indexing a stream needs pyarrow; reading samples by the index does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardcache.shared.exceptions import CorruptShardError
from shardcache.shared.formats.cells import KEY, RESERVED, CellTable
from shardcache.shared.tarindex.tables import Fault, Samples

if TYPE_CHECKING:
    import pyarrow as pa

ENCODING = b"encoding"
"""Key in the metadata of a column; its value is the name of the cells' encoding."""

# A column of numbers has two buffers: one says which cells are null, the other has the numbers.
_NUMBERS_BUFFERS = 2
_SHORT_TYPES = ("binary", "string")  # types whose offsets have 32 bits

_Span = tuple[int, int]  # start and end in the file


def index(path: Path, url: str) -> Samples:
    """Return the samples of the stream in the file at `path`. Blocks.

    Raises OSError; CorruptShardError; UnsupportedShardError for too many rows or cells.
    """
    import pyarrow as pa

    indexer = _RowIndexer(url)
    try:
        with pa.memory_map(str(path)) as file:
            # The buffer is the mapping itself and not a copy, so that the address of a cell minus
            # the buffer's address is the cell's offset in the file.
            data = file.read_buffer()
            with pa.ipc.open_stream(data) as stream:
                encodings = _encodings(stream.schema)
                for batch in stream:
                    batch.validate(full=True)
                    _check_uncompressed(batch, data)
                    indexer.add(batch, data.address)
    except (pa.ArrowException, ValueError) as exn:
        raise CorruptShardError(f"the table cannot be read ({exn})", url=url) from exn
    samples = indexer.table.samples
    samples.encodings = [encodings[name] for name in samples.extensions]
    return samples


def _check_uncompressed(batch: pa.RecordBatch, data: pa.Buffer) -> None:
    """Raise ValueError for a batch whose buffers are compressed in the file.

    Arrow decompresses them to other memory, so that they are not in the mapped file, `data`.
    """
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is None or not buffer.size:
                continue
            begin = buffer.address - data.address
            if begin < 0 or begin + buffer.size > data.size:
                raise ValueError("its buffers are compressed")


class _RowIndexer:
    """Indexes batches of rows, by the addresses of their cells in the mapped file.

    Attributes:
        table: the samples of the batches added so far.
    """

    def __init__(self, url: str) -> None:
        self.table = CellTable(url)

    def add(self, batch: pa.RecordBatch, file_address: int) -> None:
        """Add the rows of a batch.

        Args:
            batch: the rows.
            file_address: address of the mapped file's first byte.
        """
        names = [name for name in batch.schema.names if name not in RESERVED]
        columns = [self.table.column(name) for name in names]
        spans_by_column = [_spans(batch.column(name), file_address) for name in names]
        keys = _keys(batch)
        spans_by_row: Iterable[tuple[_Span | None, ...]] = zip(*spans_by_column, strict=True)
        if not names:  # `zip` of no columns would yield no rows
            spans_by_row = [()] * batch.num_rows
        for row, spans in enumerate(spans_by_row):
            by_column = zip(columns, spans, strict=True)
            cells = [(column, span) for column, span in by_column if span is not None]
            if keys is None:
                self.table.add(cells)  # the key is the row's number
            elif key := keys[row]:
                self.table.add(cells, key.encode())
            else:  # the column of keys has no key for this row
                self.table.add_fault(Fault.RESERVED, KEY)


def _keys(batch: pa.RecordBatch) -> list[str | None] | None:
    """Return the key of each row; None for a key that is neither text nor an integer.

    Returns None instead of a list if there is no column of keys.
    """
    if KEY not in batch.schema.names:
        return None
    values = batch.column(KEY).to_pylist()
    return [str(value) if isinstance(value, str | int) else None for value in values]


def _encodings(schema: pa.Schema) -> dict[str, str]:
    """Return the encodings of columns, by their names."""
    encodings = {}
    for field in schema:
        metadata = field.metadata or {}
        encodings[field.name] = metadata.get(ENCODING, b"").decode()
    return encodings


def _spans(column: pa.Array, file_address: int) -> Sequence[_Span | None]:
    """Return the span in the file of each cell of a column; None for a null.

    Args:
        column: the column in a batch.
        file_address: address of the mapped file's first byte.
    """
    if column.type.num_buffers == _NUMBERS_BUFFERS:
        spans = _spans_of_numbers(column, file_address)
    else:
        spans = _spans_of_strings(column, file_address)
    if not column.null_count:
        return spans
    are_null = column.is_null().to_pylist()
    return [None if is_null else span for is_null, span in zip(are_null, spans, strict=True)]


def _spans_of_numbers(column: pa.Array, file_address: int) -> list[_Span]:
    """Return the span of each cell in a column of numbers; a null has one, too."""
    _, numbers = column.buffers()
    width = column.type.bit_width // 8
    start = numbers.address - file_address + column.offset * width
    end = start + len(column) * width
    return [(at, at + width) for at in range(start, end, width)]


def _spans_of_strings(column: pa.Array, file_address: int) -> list[_Span]:
    """Return the span of each cell in a column of texts or byte strings; a null has one, too."""
    _, offsets_buffer, data = column.buffers()
    # Offsets are signed numbers of 32 or 64 bits.
    code: Literal["i", "q"] = "i" if str(column.type) in _SHORT_TYPES else "q"
    offsets = memoryview(offsets_buffer).cast("B").cast(code)
    # The offsets in the data of each cell's start, and of the last cell's end.
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    data_start = 0  # without data, all cells are empty, and their offsets do not matter
    if data is not None and data.size:
        data_start = data.address - file_address
    return [(data_start + begin, data_start + end) for begin, end in pairwise(offsets)]
