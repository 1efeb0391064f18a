"""Columns of a parquet file in the form in which they are cached: each cell is a range of bytes.

A cell is the value of one column in one row. Readers decode it by its column's encoding. Only
`parquet_program` uses this module.

=====================================  =========================================================
type of the file's column              value that readers decode from a cell
=====================================  =========================================================
integers, floats, bool, string         as `to_pylist` gives it
binary                                 bytes
struct of `bytes` and `path`           the bytes: an image or a sound of Hugging Face's datasets;
                                       its path is a column of its own, `NAME.path`
dictionary                             as its values' type
timestamp, decimal, list, struct, …    as `to_pylist` gives it, in tagged JSON (`cell_values`)
=====================================  =========================================================
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from shardcache.formats import cell_values
from shardcache.formats.arrow.arrow_rows import ENCODING

_FILE_FIELDS = {"bytes", "path"}

# The types in which texts and byte strings are cached, by the name of their type in the file. Views
# become large types, as they may hold more than the 2 GiB that the other types can address.
_TEXTS: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.large_string(),
}
_STRINGS_OF_BYTES: Mapping[str, pa.DataType] = {
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
        columns += _stored(field.name, field.type, schema.names)
    return columns


def _stored(name: str, type_: pa.DataType, names: list[str]) -> Iterator[StoredColumn]:
    """Yield the cached columns that are made from a column of the file.

    A column of files becomes two columns: their bytes, and their paths.

    Args:
        name: name of the column.
        type_: type of the column.
        names: names of all columns of the file.
    """
    if not _is_file(type_):
        yield _column(name, name, type_, _same)
        return
    bytes_type = type_.field("bytes").type
    yield _column(name, name, bytes_type, _bytes_of_files)
    path_column = f"{name}.path"
    if path_column not in names:  # the parquet file may have a column of that name already
        path_type = type_.field("path").type
        yield _column(path_column, name, path_type, _paths_of_files)


def _column(
    name: str, source: str, type_: pa.DataType, extract: Callable[[pa.Array], pa.Array]
) -> StoredColumn:
    """Return a column of the cached table.

    Args:
        name: name of the column.
        source: name of the file's column from which it is made.
        type_: type of the extracted values.
        extract: returns the column's values, given those of the source, such as one field of
            structs.
    """
    encoding, stored_type, convert = _form(type_)
    field = pa.field(name, stored_type, metadata={ENCODING: encoding.encode()})

    def converted(values: pa.Array) -> pa.Array:
        return convert(extract(values))

    return StoredColumn(field, source, converted)


def _form(type_: pa.DataType) -> tuple[str, pa.DataType, Callable[[pa.Array], pa.Array]]:
    """Return encoding and Arrow type of cells for values of a type, and how to make the cells.

    The third result is a function that converts values to cells.
    """
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        encoding, stored_type, convert = _form(type_.storage_type)
        return encoding, stored_type, lambda values: convert(values.storage)
    if types.is_dictionary(type_):
        encoding, stored_type, convert = _form(type_.value_type)
        return encoding, stored_type, lambda values: convert(values.dictionary_decode())
    if types.is_boolean(type_):
        return cell_values.BOOL, pa.uint8(), _cast_to(pa.uint8())
    if str(type_) in cell_values.NUMBERS:
        return str(type_), type_, _same
    if str(type_) in _TEXTS:
        stored_type = _TEXTS[str(type_)]
        return cell_values.TEXT, stored_type, _cast_to(stored_type)
    if str(type_) in _STRINGS_OF_BYTES:
        stored_type = _STRINGS_OF_BYTES[str(type_)]
        return cell_values.BYTES, stored_type, _cast_to(stored_type)
    if types.is_fixed_size_binary(type_):
        return cell_values.BYTES, pa.binary(), _cast_to(pa.binary())
    return cell_values.TAGGED, pa.binary(), _tagged


def _is_file(type_: pa.DataType) -> bool:
    """Return True for the type of images and sounds in Hugging Face's datasets."""
    return pa.types.is_struct(type_) and {field.name for field in type_} == _FILE_FIELDS


# Conversions of values to cells


def _same(values: pa.Array) -> pa.Array:
    return values


def _cast_to(type_: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    def cast(values: pa.Array) -> pa.Array:
        return values if values.type == type_ else values.cast(type_)

    return cast


def _bytes_of_files(values: pa.Array) -> pa.Array:
    return pc.struct_field(values, "bytes")


def _paths_of_files(values: pa.Array) -> pa.Array:
    return pc.struct_field(values, "path")


def _tagged(values: pa.Array) -> pa.Array:
    """Return cells with values of other types, as tagged JSON; nulls stay nulls."""
    cells = [None if value is None else cell_values.tagged(value) for value in values.to_pylist()]
    return pa.array(cells, pa.binary())
