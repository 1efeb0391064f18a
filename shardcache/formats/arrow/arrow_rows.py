"""Streams of Arrow's record batches, in which a parquet file is cached: a row is a sample.

No buffer is compressed, so that each cell is a range of the file. The metadata of a field name the
encoding of its cells (`cell_values`). A column `__key__` has the keys of samples. A column
`__url__` is left out; a sample lacks the columns in which its row has a null.

Needs pyarrow, where it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.errors import CorruptShardError
from shardcache.formats.cells import KEY, RESERVED, CellTable
from shardcache.tarindex.tables import Fault, Samples

if TYPE_CHECKING:
    import pyarrow as pa

ENCODING = b"encoding"
"""Key of a field's metadata; its value is the name of its cells' encoding."""

_BUFFERS_OF_NUMBERS = 2  # which cells are null, and the numbers
_SHORT_TYPES = ("binary", "string")  # with offsets of 32 bits

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
            data = file.read_buffer()  # without a copy: cells lie at its address
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
    """Raise ValueError for a batch whose buffers do not lie in the file: compressed ones."""
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is None or not buffer.size:
                continue
            begin = buffer.address - data.address
            if begin < 0 or begin + buffer.size > data.size:
                raise ValueError("its buffers are compressed")


class _RowTable:
    """Adds rows to a table, by the places of their cells in memory."""

    def __init__(self, url: str) -> None:
        self.table = CellTable(url)

    def add(self, batch: pa.RecordBatch, address: int) -> None:
        """Add the rows of a batch that lies in a file, whose first byte is at an address."""
        names = [name for name in batch.schema.names if name not in RESERVED]
        columns = [self.table.column(name) for name in names]
        spans = [_spans(batch.column(name), address) for name in names]
        keys = _keys(batch)
        rows: Iterable[tuple[tuple[int, int] | None, ...]] = [()] * batch.num_rows
        if spans:
            rows = zip(*spans, strict=True)
        for number, row in enumerate(rows):
            all_cells = zip(columns, row, strict=True)
            cells = {column: cell for column, cell in all_cells if cell is not None}
            key = keys[number] if keys else None
            if key:
                self.table.add(cells, key.encode())
            elif keys:  # it is empty, or no key
                self.table.add_fault(Fault.RESERVED, KEY)
            else:
                self.table.add(cells)


def _keys(batch: pa.RecordBatch) -> list[str | None] | None:
    """Return the keys of rows, None for those that are neither text nor integer.

    None instead of a list if there is no column of keys.
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
    """Return where the cells of a column lie in the file that begins at an address."""
    type_ = column.type
    if type_.num_buffers == _BUFFERS_OF_NUMBERS:
        width = type_.bit_width // 8
        start = column.buffers()[1].address - address + column.offset * width
        spans = [(at, at + width) for at in range(start, start + len(column) * width, width)]
    else:
        _, offsets, data = column.buffers()
        bytes_of_offsets = memoryview(offsets).cast("B")
        if str(type_) in _SHORT_TYPES:
            ends = bytes_of_offsets.cast("i")
        else:
            ends = bytes_of_offsets.cast("q")
        ends = ends[column.offset : column.offset + len(column) + 1]
        start = data.address - address if data is not None and data.size else 0
        spans = [(start + first, start + last) for first, last in pairwise(ends)]
    if not column.null_count:
        return spans
    nulls = column.is_null().to_pylist()
    return [None if null else span for null, span in zip(nulls, spans, strict=True)]
