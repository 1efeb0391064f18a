"""Program that writes a parquet file to its standard output as the stream of rows to cache.

`arrow_process` starts the program in a process of its own, since Arrow's decoder is much C++ code
that reads untrusted files: a fault in it must not end the daemon. If the file is damaged, the
program writes the reason to its standard error. The program ends when the reader of its output
does. Its memory is limited, since a file of some kilobytes may decompress to more than a node's
memory.
"""

import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from shardcache.shared.formats.arrow.parquet_columns import StoredColumn, stored_columns
from shardcache.shared.formats.memory_limit import limit_memory

_ARROW_FILE_MAGIC = b"ARROW1"  # an Arrow file begins with these bytes, a stream does not
_BATCH_BYTES = 16 * 1024 * 1024  # approximate size of a batch, by the size that the file states
# Rows may be larger than the file states, since a repeated value is stored once. So the number of
# rows of a batch is limited, too.
_MAX_BATCH_ROWS = 8 * 1024


def copy(path: Path, out: BinaryIO) -> None:
    """Write the rows of a parquet file, in batches of some megabytes.

    Raises OSError, ValueError (which pyarrow's errors are), TypeError, KeyError, MemoryError.
    """
    with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as parquet:
        _write(parquet.schema_arrow, _batches_of(parquet), out)


def _batches_of(parquet: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a parquet file in batches, in order; no batch spans two row groups."""
    for group in range(parquet.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        yield from parquet.iter_batches(
            _batch_rows(metadata.num_rows, metadata.total_byte_size),
            row_groups=[group],
            use_threads=False,
        )


def _batch_rows(group_rows: int, group_bytes: int) -> int:
    """Return the number of rows to decode at once, given the rows and the size of their group."""
    row_bytes = max(1, group_bytes // max(1, group_rows))
    return min(_MAX_BATCH_ROWS, max(1, _BATCH_BYTES // row_bytes))


def copy_arrow(path: Path, start: int, end: int, out: BinaryIO) -> None:
    """Write the rows of an Arrow file, or stream, that lies in a file between two offsets.

    Raises as `copy`.
    """
    with pa.memory_map(str(path)) as file:
        data = file.read_buffer()[start:end]
        magic = data[: len(_ARROW_FILE_MAGIC)].to_pybytes()
        if magic == _ARROW_FILE_MAGIC:
            with pa.ipc.open_file(data) as arrow_file:
                batches = map(arrow_file.get_batch, range(arrow_file.num_record_batches))
                _write(arrow_file.schema, batches, out)
        else:
            with pa.ipc.open_stream(data) as stream:
                _write(stream.schema, stream, out)


def _write(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: BinaryIO) -> None:
    """Write batches of rows with this schema, in the form in which they are cached."""
    columns = stored_columns(schema)
    stored_schema = pa.schema([column.field for column in columns])
    with pa.ipc.new_stream(pa.PythonFile(out, "w"), stored_schema) as stream:
        for batch in batches:
            stream.write_batch(_stored_batch(batch, columns, stored_schema))


def _stored_batch(
    batch: pa.RecordBatch, columns: list[StoredColumn], stored_schema: pa.Schema
) -> pa.RecordBatch:
    """Return a batch in the form in which it is cached."""
    arrays = [column.cells_of(batch.column(column.source)) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=stored_schema)


def main() -> None:
    """Write the file at the path that is the first argument.

    Two more arguments are the start and end of an Arrow file in that file; see `copy_arrow`.
    """
    # The default action ends the program when the reader of its output is gone.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    limit_memory()
    try:
        path = Path(sys.argv[1])
        span = [int(each) for each in sys.argv[2:]]
        if span:
            start, end = span
            copy_arrow(path, start, end, sys.stdout.buffer)
        else:
            copy(path, sys.stdout.buffer)
    except MemoryError as exn:
        sys.exit(
            "its pages or batches of rows take more memory than is allowed "
            f"({str(exn) or 'allocation failed'}): write smaller row groups and pages"
        )
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as exn:
        sys.exit(str(exn))


if __name__ == "__main__":
    main()
