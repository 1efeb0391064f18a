"""Columns of tables as members of samples: their extensions, contents and sizes.

`row_tables` reads batches of rows from parquet files and Hugging Face's datasets. This module makes
a sample of each row: each column becomes a member. The module needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from shardcache.shared.exceptions import ConfigError, InputError
from shardcache.writing.sample_tar import (
    Sample,
    as_json,
    as_npy,
    checked,
    encoded,
    member_bytes,
    utf8,
)
from shardcache.writing.sources import InputFile, read_error

_KEY = "%09d"  # a sample's key is the number of its row
_TYPICAL_NUMBER_BYTES = 8  # estimated length of an integer as text
# Formats of files by their first bytes: an offset, the bytes at that offset, and the extension.
_FORMATS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (8, b"WEBP", "webp"),
    (8, b"WAVE", "wav"),
    (0, b"GIF8", "gif"),
    (0, b"II*\0", "tif"),
    (0, b"MM\0*", "tif"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (4, b"ftyp", "mp4"),
)

_LONGEST_EXTENSION = "webp"  # no extension in `_FORMATS` is longer

ColumnKind = Literal["file", "bytes", "text", "number", "json"]
"""Kind of a column's values, which decides how they are written.

"file" is a struct of the bytes and the path of a file, either of which may be null, as in the
features Image, Audio and Video of Hugging Face's datasets. "number" is an integer, and "json" is
any other type.
"""

_DEFAULT_EXTENSIONS: Mapping[ColumnKind, str] = {"text": "txt", "number": "cls", "json": "json"}


@dataclass(frozen=True, slots=True)
class MemberColumn:
    """A column and the member that it becomes.

    Attributes:
        name: name of the column.
        kind: kind of the column's values.
        extension: extension of the member; None to recognise it by each value's first bytes.
        dtype: type of the integers in a column of lists of integers; None for other columns.
    """

    name: str
    kind: ColumnKind
    extension: str | None
    dtype: str | None = None

    def member(self, key: str, value: Any) -> tuple[str, bytes]:
        """Return extension and content of the member for a value. Raises SampleError, InputError.

        Args:
            key: key of the sample, for errors.
            value: the value as Arrow's `to_pylist` gives it.
        """
        if self.kind == "file":
            value = _file_content(value)
        if self.extension is None:
            return f"{self.name}.{_recognized_extension(value)}", value
        _, _, suffix = self.extension.rpartition(".")
        # `encoded` would refuse values that JSON lacks, such as dates. `as_json` writes them as
        # text.
        if self.kind == "json" and suffix == "json":
            return self.extension, as_json(value)
        # A text is written as it is even if its extension is .json: such texts are JSON already.
        if self.kind == "text":
            return self.extension, utf8(value)
        # An empty list does not show the type of its column, so the type is given.
        if self.dtype is not None and suffix == "npy":
            return self.extension, as_npy(value, self.dtype)
        return self.extension, encoded(key, self.extension, value)

    def lengths(self, values: pa.ChunkedArray) -> list[int | None]:
        """Return the length in bytes of each value's member, or None for a null.

        Lengths of numbers and JSON are estimates.
        """
        if self.kind in ("bytes", "text"):
            return pc.binary_length(values).to_pylist()  # type: ignore[no-any-return]
        if self.kind == "file":
            return _file_lengths(values)
        if self.kind == "json":
            # JSON text is about as long as the value is in Arrow's memory.
            typical_bytes = values.nbytes // max(1, len(values))
        else:
            typical_bytes = _TYPICAL_NUMBER_BYTES
        return [None if null else typical_bytes for null in values.is_null().to_pylist()]


def _recognized_extension(content: bytes) -> str:
    """Return the extension that a file's first bytes suggest; "bin" for an unknown format."""
    for offset, magic, extension in _FORMATS:
        if content.startswith(magic, offset):
            return extension
    return "bin"


def _file_lengths(values: pa.ChunkedArray) -> list[int | None]:
    """Return the length in bytes of each file in a column of kind "file"; None for a null."""
    lengths: list[int | None] = pc.binary_length(pc.struct_field(values, "bytes")).to_pylist()
    if None not in lengths:
        return lengths
    paths = pc.struct_field(values, "path").to_pylist()
    for row, path in enumerate(paths):
        if lengths[row] is None and path:
            lengths[row] = InputFile.at(Path(path)).size_bytes
    return lengths


def columns_of(schema: pa.Schema, extensions: Mapping[str, str], url: str) -> list[MemberColumn]:
    """Return the columns to write.

    Args:
        schema: schema of the table.
        extensions: by the name of each column to write, the extension of its member. If empty, all
            columns are written; their extensions begin with the column's name: `caption.txt`.
        url: url or path of the table, for errors.

    Raises ConfigError for a column that does not exist, two columns of one name, and a name that
    cannot be a member's extension.
    """
    _check_names(schema, extensions, url)
    columns = []
    for name in extensions or schema.names:
        type_ = schema.field(name).type
        kind = _kind(type_)
        extension = extensions.get(name)
        if extension is None and kind in _DEFAULT_EXTENSIONS:
            extension = f"{name}.{_DEFAULT_EXTENSIONS[kind]}"
        columns.append(MemberColumn(name, kind, extension, _dtype(type_)))
    return columns


def _check_names(schema: pa.Schema, extensions: Mapping[str, str], url: str) -> None:
    """Raise ConfigError for the names of columns for which `columns_of` raises it."""
    unknown = sorted(extensions.keys() - set(schema.names))
    if unknown:
        raise ConfigError(
            f"there is no column {unknown[0]!r}",
            url=url,
            remedy=f"the columns are: {', '.join(schema.names)}",
        )
    for name in extensions or schema.names:
        if schema.names.count(name) > 1:
            raise ConfigError(
                f"two columns have the name {name!r}",
                url=url,
                remedy="rename one of them, or leave both out: --columns image=jpg,label=cls "
                "names those to write",
            )
        # Unless the user has chosen extensions, an extension begins with the column's name.
        if not extensions and ("/" in name or name.startswith("__")):
            raise ConfigError(
                f"readers would not find a member named after the column {name!r}",
                url=url,
                remedy="choose columns and extensions: --columns image=jpg,label=cls",
            )


def samples_of_rows(
    rows: pa.Table, columns: Sequence[MemberColumn], numbers: Iterable[int]
) -> Iterator[Sample]:
    """Yield a sample for each row, with the row's number as key; a null makes no member.

    Args:
        rows: the rows.
        columns: the columns to write.
        numbers: the number of each row in the whole input.

    Raises SampleError for a value that cannot be written; InputError for a text that is not UTF-8,
    and a file that cannot be read.
    """
    try:
        values_by_column = [rows.column(column.name).to_pylist() for column in columns]
    except UnicodeDecodeError as exn:
        raise InputError(
            f"a text is not UTF-8 ({exn})",
            remedy="leave its column out with --columns",
        ) from exn
    values_by_row = zip(*values_by_column, strict=True)
    for number, values in zip(numbers, values_by_row, strict=True):
        key = _KEY % number
        members = []
        for column, value in zip(columns, values, strict=True):
            if value is not None:
                members.append(column.member(key, value))
        yield checked(Sample(key, tuple(members)))


def sizes_of_rows(rows: pa.Table, columns: Sequence[MemberColumn]) -> Iterator[int]:
    """Yield the size of each row's sample in a tar, in bytes.

    The sizes are estimates where the lengths from `MemberColumn.lengths` are.
    """
    lengths_by_column = [column.lengths(rows.column(column.name)) for column in columns]
    extensions = [column.extension or f"{column.name}.{_LONGEST_EXTENSION}" for column in columns]
    name_lengths = [len(f"{_KEY % 0}.{extension}") for extension in extensions]
    for lengths in zip(*lengths_by_column, strict=True):
        size_bytes = 0
        for name_bytes, content_bytes in zip(name_lengths, lengths, strict=True):
            if content_bytes is not None:
                size_bytes += member_bytes(name_bytes, content_bytes)
        yield size_bytes


def _kind(type_: pa.DataType) -> ColumnKind:
    """Return the kind of a column, given its Arrow type."""
    types = pa.types
    if types.is_struct(type_) and {field.name for field in type_} == {"bytes", "path"}:
        return "file"
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_):
        return "bytes"
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    if types.is_integer(type_):
        return "number"
    return "json"


def _dtype(type_: pa.DataType) -> str | None:
    """Return the type of the integers in a column of lists of integers; None for other columns."""
    types = pa.types
    is_list = types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    if is_list and types.is_integer(type_.value_type):
        return str(type_.value_type)
    return None


def _file_content(value: Mapping[str, Any]) -> bytes:
    """Return the content of a value of kind "file". Raises InputError."""
    if value["bytes"] is not None:
        return bytes(value["bytes"])
    if value["path"] is None:
        raise InputError("a value has neither bytes nor a path", remedy="drop such rows")
    try:
        return Path(value["path"]).read_bytes()
    except OSError as exn:
        raise read_error(exn, Path(value["path"])) from exn
