"""Streams of Arrow's record batches, in which a parquet file is cached: a row is a sample.

A stream's buffers are not compressed, so that each cell, the value of a column in a row, is a range
of the file. The metadata of a field (a column in Arrow's schema) names the encoding of its cells
(`cell_values`). A column `__key__` has the keys of samples, and a column `__url__` is left out. A
sample lacks the columns in which its row has a null.

Indexing a stream needs pyarrow; reading samples by the index does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardcache.errors import CorruptShardError
from shardcache.formats.cells import KEY, RESERVED, CellTable
from shardcache.tarindex.tables import Fault, Samples

if TYPE_CHECKING:
    import pyarrow as pa

ENCODING = b"encoding"
"""Key of a field's metadata; its value is the name of its cells' encoding."""

# A column of numbers has two buffers: one says which cells are null, the other has the numbers.
_BUFFERS_OF_NUMBERS = 2
_SHORT_TYPES = ("binary", "string")  # types whose offsets have 32 bits

_CellSpans = Sequence[tuple[int, int] | None]
"""Start and end of each cell of a column in the file; None for a null."""


def index(path: Path, url: str) -> Samples:
    """Return the samples of the stream in the file at `path`. Blocks.

    Raises OSError; CorruptShardError; UnsupportedShardError for too many rows or cells.
    """
    import pyarrow as pa

    rows = _RowTable(url)
    try:
        with pa.memory_map(str(path)) as file:
            # The buffer is the mapping itself and not a copy, so that the address of a cell minus
            # the buffer's address is the cell's offset in the file.
            data = file.read_buffer()
            with pa.ipc.open_stream(data) as stream:
                encodings = _encodings(stream.schema)
                for batch in stream:
                    batch.validate(full=True)
                    _check_place(batch, data)
                    rows.add(batch, data.address)
    except (pa.ArrowException, ValueError) as exn:
        raise CorruptShardError(f"the table cannot be read ({exn})", url=url) from exn
    samples = rows.table.samples
    samples.encodings = [encodings[name] for name in samples.extensions]
    return samples


def _check_place(batch: pa.RecordBatch, data: pa.Buffer) -> None:
    """Raise ValueError for a batch whose buffers are compressed.

    Arrow decompresses such buffers to other memory, so that they do not lie in the mapped file.
    """
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is None or not buffer.size:
                continue
            begin = buffer.address - data.address
            if begin < 0 or begin + buffer.size > data.size:
                raise ValueError("its buffers are compressed")


class _RowTable:
    """Adds rows to a `CellTable`, by the addresses of their cells in the mapped file."""

    def __init__(self, url: str) -> None:
        self.table = CellTable(url)

    def add(self, batch: pa.RecordBatch, address: int) -> None:
        """Add the rows of a batch. `address` is that of the mapped file's first byte."""
        names = [name for name in batch.schema.names if name not in RESERVED]
        columns = [self.table.column(name) for name in names]
        spans = [_spans(batch.column(name), address) for name in names]
        keys = _keys(batch)
        rows: Iterable[tuple[tuple[int, int] | None, ...]] = zip(*spans, strict=True)
        if not spans:  # then `zip` yields no rows
            rows = [()] * batch.num_rows
        for number, row in enumerate(rows):
            all_cells = zip(columns, row, strict=True)
            cells = [(column, cell) for column, cell in all_cells if cell is not None]
            key = keys[number] if keys else None
            if key:
                self.table.add(cells, key.encode())
            elif keys:  # the row's key is empty, or neither text nor an integer
                self.table.add_fault(Fault.RESERVED, KEY)
            else:
                self.table.add(cells)


def _keys(batch: pa.RecordBatch) -> list[str | None] | None:
    """Return the key of each row, None for a key that is neither text nor an integer.

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


def _spans(column: pa.Array, address: int) -> _CellSpans:
    """Return start and end in the file of each cell of a column.

    Args:
        column: the column in a batch.
        address: address of the mapped file's first byte.
    """
    type_ = column.type
    if type_.num_buffers == _BUFFERS_OF_NUMBERS:
        width = type_.bit_width // 8
        start = column.buffers()[1].address - address + column.offset * width
        spans = [(at, at + width) for at in range(start, start + len(column) * width, width)]
    else:
        _, offsets_buffer, data = column.buffers()
        # Offsets are signed numbers of 32 or 64 bits.
        code: Literal["i", "q"] = "i" if str(type_) in _SHORT_TYPES else "q"
        offsets = memoryview(offsets_buffer).cast("B").cast(code)
        # The offsets in the data of each cell's start, and of the last cell's end.
        offsets = offsets[column.offset : column.offset + len(column) + 1]
        start = 0  # without data, all cells are empty, and their place does not matter
        if data is not None and data.size:
            start = data.address - address
        spans = [(start + begin, start + end) for begin, end in pairwise(offsets)]
    if not column.null_count:
        return spans
    nulls = column.is_null().to_pylist()
    return [None if null else span for null, span in zip(nulls, spans, strict=True)]
