"""Columns of Arrow tables as members of samples. Needs pyarrow."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from shardcache.errors import ConfigError, InputError
from shardcache.writing.plan.samples import Sample, as_json, checked, encoded
from shardcache.writing.plan.tar import member_bytes
from shardcache.writing.sources.source import unreadable

Rows: TypeAlias = "pa.Table | pa.RecordBatch"

_KEY = "%09d"
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
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
_TYPICAL_NUMBER_BYTES = 8


class ColumnKind(enum.Enum):
    """Kind of a column's values, which decides how they are written."""

    FILE = "file: bytes, or the path of a file, as in the features Image, Audio and Video of Hugging Face's datasets"
    BYTES = "bytes"
    TEXT = "text"
    NUMBER = "integer"
    JSON = "anything else"


_EXTENSIONS = {ColumnKind.TEXT: "txt", ColumnKind.NUMBER: "cls", ColumnKind.JSON: "json"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column and the member that it becomes.

    Attributes:
        extension: of the member; None if it is found out by the first bytes of a value.
        dtype: type of the integers in a column of lists; None for other columns.
    """

    name: str
    kind: ColumnKind
    extension: str | None
    dtype: str | None = None

    def member(self, key: str, value: Any) -> tuple[str, bytes]:
        """Return extension and content. Raises SampleError."""
        if self.kind is ColumnKind.FILE:
            value = _file_content(value)
        if self.extension is None:
            return f"{self.name}.{_by_magic(value)}", value
        if self.kind is ColumnKind.JSON and self.extension.rpartition(".")[2] == "json":
            return self.extension, as_json(value)
        if self.kind is ColumnKind.TEXT:  # JSON in a column of texts is JSON already
            return self.extension, value.encode("utf-8", "surrogateescape")
        if self.dtype is not None and self.extension.rpartition(".")[2] == "npy":
            import numpy  # only users of arrays need it

            value = numpy.asarray(value, self.dtype)  # the type of an empty list does not show in its values
        return self.extension, encoded(key, self.extension, value)


def columns_of(schema: pa.Schema, wanted: Mapping[str, str], url: str) -> list[Column]:
    """Return the columns to write.

    Args:
        wanted: column → extension; if empty, all columns, as `<column>.<kind>`.

    Raises ConfigError for a column that does not exist, or whose name is no extension.
    """
    unknown = sorted(wanted.keys() - set(schema.names))
    if unknown:
        raise ConfigError(
            f"there is no column {unknown[0]!r}", url=url, remedy=f"the columns are: {', '.join(schema.names)}"
        )
    if not wanted and (misleading := [name for name in schema.names if "/" in name or name.startswith("__")]):
        raise ConfigError(
            f"readers would not find a member named after the column {misleading[0]!r}",
            url=url,
            remedy="choose columns and extensions: --columns image=jpg,label=cls",
        )
    found = []
    for name in wanted or schema.names:
        kind = _kind(schema.field(name).type)
        usual = f"{name}.{_EXTENSIONS[kind]}" if kind in _EXTENSIONS else None
        found.append(Column(name, kind, wanted.get(name, usual), _dtype(schema.field(name).type)))
    return found


def samples(rows: Rows, columns: Sequence[Column], numbers: Iterable[int]) -> Iterator[Sample]:
    """Yield a sample for each row, its number as key; a null is left out. Raises SampleError, InputError."""
    try:
        values = [rows.column(column.name).to_pylist() for column in columns]
    except UnicodeDecodeError as exn:
        raise InputError(f"a text is not UTF-8 ({exn})", remedy="leave its column out with --columns") from exn
    for number, row in zip(numbers, zip(*values, strict=True), strict=True):
        key = _KEY % number
        members = (column.member(key, value) for column, value in zip(columns, row, strict=True) if value is not None)
        yield checked(Sample(key, tuple(members)))


def sizes(rows: Rows, columns: Sequence[Column]) -> Iterator[int]:
    """Yield the size of each row's sample in a tar, in bytes; JSON's is estimated by Arrow's."""
    table = pa.table(rows) if isinstance(rows, pa.RecordBatch) else rows
    lengths = [_lengths(table.column(column.name), column.kind) for column in columns]
    names = [len(column.extension or f"{column.name}.jpeg") + len(_KEY % 0) + 1 for column in columns]
    for row in zip(*lengths, strict=True):
        yield sum(member_bytes(name, size) for name, size in zip(names, row, strict=True) if size is not None)


def _kind(type_: pa.DataType) -> ColumnKind:
    if pa.types.is_struct(type_) and {field.name for field in type_} == {"bytes", "path"}:
        return ColumnKind.FILE
    for kind, checks in _TYPES.items():
        if any(is_(type_) for is_ in checks):
            return kind
    return ColumnKind.JSON


def _dtype(type_: pa.DataType) -> str | None:
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return str(type_.value_type) if is_list and pa.types.is_integer(type_.value_type) else None


_TYPES: Mapping[ColumnKind, tuple[Callable[[pa.DataType], bool], ...]] = {
    ColumnKind.BYTES: (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary),
    ColumnKind.TEXT: (pa.types.is_string, pa.types.is_large_string),
    ColumnKind.NUMBER: (pa.types.is_integer,),
}


def _lengths(column: pa.ChunkedArray, kind: ColumnKind) -> list[int | None]:
    """Return the length of each value as a member, or None for a null."""
    if kind in (ColumnKind.BYTES, ColumnKind.TEXT):
        return pc.binary_length(column).to_pylist()  # type: ignore[no-any-return]
    if kind is ColumnKind.FILE:
        inline = pc.binary_length(pc.struct_field(column, "bytes")).to_pylist()
        if None not in inline:
            return inline  # type: ignore[no-any-return]
        paths = pc.struct_field(column, "path").to_pylist()
        return [_file_size(path) if size is None else size for size, path in zip(inline, paths, strict=True)]
    mean = _TYPICAL_NUMBER_BYTES if kind is ColumnKind.NUMBER else column.nbytes // max(1, len(column))
    return [None if null else mean for null in column.is_null().to_pylist()]


def _file_size(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        return Path(path).stat().st_size
    except OSError as exn:
        raise unreadable(exn, Path(path)) from exn


def _file_content(value: Mapping[str, Any]) -> bytes:
    if value["bytes"] is not None:
        return bytes(value["bytes"])
    try:
        return Path(value["path"]).read_bytes()
    except OSError as exn:
        raise unreadable(exn, Path(value["path"])) from exn
    except TypeError:
        raise InputError("a value has neither bytes nor a path", remedy="drop such rows") from None


def _by_magic(value: bytes) -> str:
    return next((name for at, magic, name in _MAGIC if value.startswith(magic, at)), "bin")
