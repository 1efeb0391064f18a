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
timestamp, decimal, list, struct, …    as `to_pylist` gives it, from tagged JSON: JSON in which
                                       values of further types have tags with their types
=====================================  =========================================================

Images and sounds are called media here; a file is always a parquet file, or an Arrow file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from shardcache.shared.formats import cell_values
from shardcache.shared.formats.arrow.arrow_rows import ENCODING

_MEDIA_FIELDS = {"bytes", "path"}

# Types of the cells of texts and byte strings, by the names of the types that these have in the
# file. Views become large types, since they may hold more than the 2 GiB that the other types can
# address.
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
        cells_of: returns the column's cells, given the source's values in a batch.
    """

    field: pa.Field
    source: str
    cells_of: Callable[[pa.Array], pa.Array]


def stored_columns(schema: pa.Schema) -> list[StoredColumn]:
    """Return the columns in which a file with this schema is cached. Raises ValueError."""
    columns: list[StoredColumn] = []
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise ValueError(f"two columns have the name {field.name!r}")
        columns += _columns_from(field.name, field.type, schema.names)
    return columns


def _columns_from(source: str, type_: pa.DataType, names: list[str]) -> Iterator[StoredColumn]:
    """Yield the cached columns that are made from a column of the file.

    A column of media becomes two columns: their bytes, and their paths.

    Args:
        source: name of the column.
        type_: type of the column.
        names: names of all columns of the file.
    """
    if not _is_media(type_):
        yield _new_column(source, type_, source=source, extract=_unchanged)
        return
    bytes_type = type_.field("bytes").type
    yield _new_column(source, bytes_type, source=source, extract=_bytes_of_media)
    path_column = f"{source}.path"
    # If the file has a column of that name itself, that column is cached, and the paths are not.
    if path_column not in names:
        path_type = type_.field("path").type
        yield _new_column(path_column, path_type, source=source, extract=_paths_of_media)


def _new_column(
    name: str, type_: pa.DataType, *, source: str, extract: Callable[[pa.Array], pa.Array]
) -> StoredColumn:
    """Return a column of the cached table.

    Args:
        name: name of the column.
        type_: type of the extracted values.
        source: name of the file's column from which it is made.
        extract: returns the column's values, given those of the source. It may take one field of
            structs.
    """
    cell_format = _cell_format(type_)
    metadata = {ENCODING: cell_format.encoding.encode()}
    field = pa.field(name, cell_format.type, metadata=metadata)

    def cells_of(source_values: pa.Array) -> pa.Array:
        return cell_format.encode(extract(source_values))

    return StoredColumn(field, source, cells_of)


class _CellFormat(NamedTuple):
    """The form in which the values of a type are cached.

    Attributes:
        encoding: encoding of the cells.
        type: Arrow type of the cells.
        encode: returns the cells of values.
    """

    encoding: str
    type: pa.DataType
    encode: Callable[[pa.Array], pa.Array]


def _cell_format(type_: pa.DataType) -> _CellFormat:
    """Return the form in which values of an Arrow type are cached."""
    types = pa.types
    # Extension types and dictionaries are cached as the values that they stand for.
    if isinstance(type_, pa.BaseExtensionType):
        inner = _cell_format(type_.storage_type)
        return inner._replace(encode=lambda values: inner.encode(values.storage))
    if types.is_dictionary(type_):
        inner = _cell_format(type_.value_type)
        return inner._replace(encode=lambda values: inner.encode(values.dictionary_decode()))
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


def _is_media(type_: pa.DataType) -> bool:
    """Return True for the type of images and sounds in Hugging Face's datasets."""
    return pa.types.is_struct(type_) and {field.name for field in type_} == _MEDIA_FIELDS


def _unchanged(values: pa.Array) -> pa.Array:
    return values


def _bytes_of_media(values: pa.Array) -> pa.Array:
    return pc.struct_field(values, "bytes")


def _paths_of_media(values: pa.Array) -> pa.Array:
    return pc.struct_field(values, "path")


def _tagged(values: pa.Array) -> pa.Array:
    """Return cells that hold the values as tagged JSON; nulls stay nulls."""
    cells = [None if value is None else cell_values.tagged(value) for value in values.to_pylist()]
    return pa.array(cells, pa.binary())
