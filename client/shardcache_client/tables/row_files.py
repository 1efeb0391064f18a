"""Rows of files that hold tables: JSON lines, CSV, parquet.

Each row is parsed as a whole, and turned into one line of JSON. `node_tables` writes these lines
into a file that processes map into their memory. `shared/formats` reads files of the same kinds,
but indexes the place of each cell. Here that would take longer than parsing the line, and the index
would have two thirds of the file's size.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from pathlib import Path
from typing import IO, Any, cast

from shardcache.shared.exceptions import ConfigError, MetadataError
from shardcache.shared.formats.zstd_library import zstd_library
from shardcache.shared.urls.url_names import path_of

Row = dict[str, Any]
Reader = Callable[[str, IO[bytes], Sequence[str] | None], Iterator[Row]]
"""Yields the rows of an open file, and closes it. Called with url, file and wanted columns."""

_REPAIR_REMEDY = "repair the file, or write it again"
_PARQUET_BATCH_ROWS = 4_096
_SHOWN_BYTES = 80  # number of bytes of an invalid line that an error shows


# Each of these functions opens a file, to be read uncompressed. The casts are for mypy: the
# stubs of gzip and zstd do not declare their files as `IO`, unlike those of bz2 and lzma.


def _open_plain(path: Path) -> IO[bytes]:
    return path.open("rb")


def _open_gzip(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path))


def _open_bzip2(path: Path) -> IO[bytes]:
    return bz2.open(path)


def _open_xz(path: Path) -> IO[bytes]:
    return lzma.open(path)


def _open_zstd(path: Path) -> IO[bytes]:
    try:
        zstd = zstd_library()
    except ImportError as exn:
        raise ConfigError(
            "a table that is compressed with zstd needs a package that is not installed",
            remedy="pip install backports.zstd",
        ) from exn
    return cast(IO[bytes], zstd.open(path))


_COMPRESSIONS: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": _open_gzip,
    ".zst": _open_zstd,
    ".bz2": _open_bzip2,
    ".xz": _open_xz,
}


def rows_of(url: str, path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    """Yield the rows of a file, in its order.

    Args:
        url: url of the file, whose suffixes name the format and the compression.
        path: path of the file on this node.
        columns: names of the wanted columns, including the column of keys; None for all. Rows may
            lack some of these columns, and have others as well.

    Raises ConfigError for an unknown format, MetadataError for a file that is damaged or not in the
    format that its name says.
    """
    name = path_of(url).lower()
    compression = next((suffix for suffix in _COMPRESSIONS if name.endswith(suffix)), "")
    open_file = _COMPRESSIONS.get(compression, _open_plain)
    read = _reader_for(name.removesuffix(compression), url)
    try:
        yield from read(url, open_file(path), columns)
    except _damage_errors() as exn:  # evaluated only when there is an error
        raise MetadataError(
            f"the table cannot be read to its end ({exn})", url=url, remedy=_REPAIR_REMEDY
        ) from exn


def _damage_errors() -> tuple[type[Exception], ...]:
    """Return the errors that reading a damaged file raises."""
    # gzip and bz2 raise OSError for bad data, and EOFError for a truncated file.
    compression_errors = (OSError, EOFError, zlib.error, lzma.LZMAError)
    # RecursionError is for JSON that is nested too deep, ValueError for text that is not UTF-8.
    text_errors = (ValueError, RecursionError)
    # OverflowError is for a time that Python cannot represent, NotImplementedError for a type or an
    # encoding that pyarrow cannot read.
    arrow_errors = (OverflowError, NotImplementedError)
    errors = (*compression_errors, *text_errors, *arrow_errors)
    try:
        return (*errors, zstd_library().ZstdError)
    except ImportError:
        return errors


# The readers of each format; see `Reader`. Those of text formats ignore `columns`, as they have to
# parse whole lines anyway.


def _json_lines(url: str, file: IO[bytes], columns: Sequence[str] | None) -> Iterator[Row]:
    with file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as exn:
                raise MetadataError(
                    f"line {number} is not JSON ({exn})", url=url, remedy=_REPAIR_REMEDY
                ) from exn
            if not isinstance(row, dict):
                shown = line[:_SHOWN_BYTES].decode(errors="replace")
                raise MetadataError(
                    f"line {number} is not a JSON object: {shown}", url=url, remedy=_REPAIR_REMEDY
                )
            yield row


def _separated(delimiter: str) -> Reader:
    """Return a reader of files whose fields are separated by a character."""

    def read(url: str, file: IO[bytes], columns: Sequence[str] | None) -> Iterator[Row]:
        with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            rows = csv.DictReader(text, delimiter=delimiter, strict=True)
            try:
                _check_header(rows.fieldnames or (), url)
                for row in rows:
                    # DictReader puts surplus fields under the key None, and the value None for a
                    # missing field.
                    if None in row or None in row.values():
                        raise MetadataError(
                            f"line {rows.line_num} has another number of fields than the header",
                            url=url,
                            remedy=_REPAIR_REMEDY,
                        )
                    yield row
            except csv.Error as exn:
                raise MetadataError(
                    f"line {rows.line_num}: {exn}",
                    url=url,
                    remedy=f"{_REPAIR_REMEDY}; if a field is just long, call "
                    "csv.field_size_limit(BYTES) before you open the table",
                ) from exn

    return read


def _check_header(names: Sequence[str], url: str) -> None:
    """Raise MetadataError if two columns have the same name, as one of them would be lost."""
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise MetadataError(
            f"two columns have the name {repeated[0]!r}", url=url, remedy="rename one of them"
        )


def _parquet(url: str, file: IO[bytes], columns: Sequence[str] | None) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as exn:
        raise ConfigError(
            "a table in parquet needs pyarrow, which is not installed",
            url=url,
            remedy="pip install pyarrow",
        ) from exn
    # From a mapped file, pyarrow reads one page of a column at a time. From any other file, it
    # copies a row group's whole column into memory.
    source: Any = file
    is_uncompressed = isinstance(file, io.BufferedReader)
    if is_uncompressed:
        source = pyarrow.memory_map(file.name)
    with file, source:  # closing the same file twice does no harm
        table = parquet.ParquetFile(source)
        names_in_file = table.schema_arrow.names
        wanted = set(names_in_file if columns is None else columns)
        read_columns = [name for name in names_in_file if name in wanted]
        _check_header(read_columns, url)
        # pyarrow's threads would take memory, and save little time: they only decode the values.
        # Making Python objects of the values, which takes longer, is left to this thread.
        for batch in table.iter_batches(
            _PARQUET_BATCH_ROWS, columns=read_columns, use_threads=False
        ):
            yield from batch.to_pylist()


_READERS: dict[tuple[str, ...], Reader] = {
    (".jsonl", ".ndjson", ".json"): _json_lines,
    (".csv",): _separated(","),
    (".tsv",): _separated("\t"),
    (".parquet",): _parquet,
}


def _reader_for(name: str, url: str) -> Reader:
    """Return the reader for a file's name. Raises ConfigError for an unknown format."""
    for suffixes, read in _READERS.items():
        if name.endswith(suffixes):
            return read
    known = ", ".join(suffix for suffixes in _READERS for suffix in suffixes)
    raise ConfigError(
        "a table of this kind cannot be read",
        url=url,
        remedy=f"tables are files with names like {known}, compressed or not "
        f"({', '.join(_COMPRESSIONS)})",
    )


def _as_text(value: object) -> str:
    """Return a date or time as text; raise TypeError for any other value."""
    if isinstance(value, date | time):  # a datetime is a date as well
        return value.isoformat()
    raise TypeError(f"a value is of the type {type(value).__name__}")


# `json.dumps` would make an encoder for every row, which takes nearly as long as encoding the row.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_text)


def line_of(key: str, row: Row, url: str) -> str:
    """Return a key and its row as one line of JSON, with times and dates in ISO 8601.

    Raises ConfigError for values that JSON does not have.
    """
    try:
        return _ENCODER.encode([key, row])
    except TypeError as exn:
        raise ConfigError(
            "a table's values are text, numbers and lists or objects of them: "
            f"{_invalid_value(row, exn)}",
            url=url,
            remedy="name the columns that you want: Table(..., columns=[...]); keep bytes in "
            "shards, not in tables",
        ) from exn


def _invalid_value(row: Row, exn: TypeError) -> str:
    """Return a description of the value that cannot be encoded, with its column if it is bytes."""
    for name, value in row.items():
        if isinstance(value, bytes):
            return f"the column {name!r} has bytes"
    return str(exn)
