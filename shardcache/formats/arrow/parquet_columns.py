"""Columns of a parquet file in the form in which they are cached: each cell is a range of bytes.

A cell is the value of one column in one row. Readers decode it by its column's encoding
(`cell_values`). Only `parquet_program` uses this module.

=====================================  =========================================================
type of the file's column              value that readers decode from a cell
=====================================  =========================================================
integers, floats, bool, string         as `to_pylist` gives it
binary                                 bytes
struct of `bytes` and `path`           the bytes: an image or a sound of Hugging Face's datasets;
                                       its path is a column of its own, `NAME.path`
dictionary                             as its values' type
timestamp, decimal, list, struct, …    as `to_pylist` gives it, from tagged JSON
=====================================  =========================================================
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from shardcache.formats import cell_values
from shardcache.formats.arrow.arrow_rows import ENCODING

_FILE_FIELDS = {"bytes", "path"}

# The types as which texts and byte strings are cached, by the name of their type in the file. Views
# become large types, since they may hold more than the 2 GiB that the other types can address.
_TEXTS: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.large_string(),
}
_BYTE_STRINGS: Mapping[str, pa.DataType] = {
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "binary_view": pa.large_binary(),
}


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column of the cached table.

    Attributes:
        field: name and type of the column, with the encoding of its cells.
        source: name of the parquet file's column from which this one is made.
        convert: makes the column's cells from the source's values in a batch.
    """

    field: pa.Field
    source: str
    convert: Callable[[pa.Array], pa.Array]


def stored_columns(schema: pa.Schema) -> list[StoredColumn]:
    """Return the columns in which a file with this schema is cached. Raises ValueError."""
    columns: list[StoredColumn] = []
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise ValueError(f"two columns have the name {field.name!r}")
        columns += _stored_columns_of(field.name, field.type, schema.names)
    return columns


def _stored_columns_of(name: str, type_: pa.DataType, names: list[str]) -> Iterator[StoredColumn]:
    """Yield the cached columns that are made from a column of the file.

    A column of files becomes two columns: their bytes, and their paths.

    Args:
        name: name of the column.
        type_: type of the column.
        names: names of all columns of the file.
    """
    if not _is_file(type_):
        yield _stored_column(name, name, type_, _unchanged)
        return
    bytes_type = type_.field("bytes").type
    yield _stored_column(name, name, bytes_type, _bytes_of_files)
    path_column = f"{name}.path"
    if path_column not in names:  # the parquet file may have a column of that name already
        path_type = type_.field("path").type
        yield _stored_column(path_column, name, path_type, _paths_of_files)


def _stored_column(
    name: str, source: str, type_: pa.DataType, extract: Callable[[pa.Array], pa.Array]
) -> StoredColumn:
    """Return a column of the cached table.

    Args:
        name: name of the column.
        source: name of the file's column from which it is made.
        type_: type of the extracted values.
        extract: returns the column's values, given those of the source. It may take one field of
            structs.
    """
    cells = _cell_format(type_)
    field = pa.field(name, cells.type, metadata={ENCODING: cells.encoding.encode()})

    def convert(values: pa.Array) -> pa.Array:
        return cells.convert(extract(values))

    return StoredColumn(field, source, convert)


class _CellFormat(NamedTuple):
    """The form in which the values of a type are cached.

    Attributes:
        encoding: encoding of the cells.
        type: Arrow type of the cells.
        convert: makes cells from values.
    """

    encoding: str
    type: pa.DataType
    convert: Callable[[pa.Array], pa.Array]


def _cell_format(type_: pa.DataType) -> _CellFormat:
    """Return the form in which values of an Arrow type are cached."""
    types = pa.types
    # Extension types and dictionaries are cached as the values that they stand for.
    if isinstance(type_, pa.BaseExtensionType):
        storage = _cell_format(type_.storage_type)
        return storage._replace(convert=lambda values: storage.convert(values.storage))
    if types.is_dictionary(type_):
        decoded = _cell_format(type_.value_type)
        return decoded._replace(convert=lambda values: decoded.convert(values.dictionary_decode()))
    if types.is_boolean(type_):
        return _cast_format(cell_values.BOOL, pa.uint8())
    if str(type_) in cell_values.NUMBERS:
        return _CellFormat(str(type_), type_, _unchanged)
    if str(type_) in _TEXTS:
        return _cast_format(cell_values.TEXT, _TEXTS[str(type_)])
    if str(type_) in _BYTE_STRINGS:
        return _cast_format(cell_values.BYTES, _BYTE_STRINGS[str(type_)])
    if types.is_fixed_size_binary(type_):
        return _cast_format(cell_values.BYTES, pa.binary())
    return _CellFormat(cell_values.TAGGED, pa.binary(), _tagged)


def _cast_format(encoding: str, type_: pa.DataType) -> _CellFormat:
    """Return the form of cells that are made by a cast to a type."""

    def cast(values: pa.Array) -> pa.Array:
        return values if values.type == type_ else values.cast(type_)

    return _CellFormat(encoding, type_, cast)


def _is_file(type_: pa.DataType) -> bool:
    """Return True for the type of images and sounds in Hugging Face's datasets."""
    return pa.types.is_struct(type_) and {field.name for field in type_} == _FILE_FIELDS


def _unchanged(values: pa.Array) -> pa.Array:
    return values


def _bytes_of_files(values: pa.Array) -> pa.Array:
    return pc.struct_field(values, "bytes")


def _paths_of_files(values: pa.Array) -> pa.Array:
    return pc.struct_field(values, "path")


def _tagged(values: pa.Array) -> pa.Array:
    """Return cells that hold the values as tagged JSON; nulls stay nulls."""
    cells = [None if value is None else cell_values.tagged(value) for value in values.to_pylist()]
    return pa.array(cells, pa.binary())
