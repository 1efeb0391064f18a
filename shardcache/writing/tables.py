"""Tables: each row of parquet files, or of a dataset of Hugging Face's `datasets`, becomes a sample. Needs pyarrow."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardcache.errors import ConfigError, InputError
from shardcache.writing.sample import Sample, as_json, checked, encoded, member_bytes, utf8
from shardcache.writing.source import HUB, fact_of, open_unchanged, unreadable

if TYPE_CHECKING:
    import datasets

_BLOCK_ROWS = 1024
_KEY = "%09d"
_KEY_CHARS = 9
_TYPICAL_NUMBER_BYTES = 8
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


ColumnKind = Literal["file", "bytes", "text", "number", "json"]
"""Kind of a column's values, which decides how they are written: "file" is bytes, or the path of a file, as in the
features Image, Audio and Video of Hugging Face's datasets; "number" is an integer, "json" anything else."""

_EXTENSIONS: Mapping[ColumnKind, str] = {"text": "txt", "number": "cls", "json": "json"}


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
        """Return extension and content. Raises SampleError, InputError."""
        if self.kind == "file":
            value = _file_content(value)
        if self.extension is None:
            found = (name for at, magic, name in _MAGIC if value.startswith(magic, at))
            return f"{self.name}.{next(found, 'bin')}", value
        suffix = self.extension.rpartition(".")[2]
        if self.kind == "json" and suffix == "json":
            return self.extension, as_json(value)
        if self.kind == "text":  # JSON in a column of texts is JSON already
            return self.extension, utf8(value)
        if self.dtype is not None and suffix == "npy":
            import numpy  # only users of arrays need it

            value = numpy.asarray(value, self.dtype)  # the type of an empty list does not show in its values
        return self.extension, encoded(key, self.extension, value)

    def lengths(self, values: pa.ChunkedArray) -> list[int | None]:
        """Return the length of each value as a member, or None for a null; estimated for numbers and JSON."""
        if self.kind in ("bytes", "text"):
            return pc.binary_length(values).to_pylist()  # type: ignore[no-any-return]
        if self.kind == "file":
            inline = pc.binary_length(pc.struct_field(values, "bytes")).to_pylist()
            paths = pc.struct_field(values, "path").to_pylist() if None in inline else inline
            return [_file_size(path) if size is None else size for size, path in zip(inline, paths, strict=True)]
        mean = _TYPICAL_NUMBER_BYTES if self.kind == "number" else values.nbytes // max(1, len(values))
        return [None if null else mean for null in values.is_null().to_pylist()]


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


def samples(rows: pa.Table, columns: Sequence[Column], numbers: Iterable[int]) -> Iterator[Sample]:
    """Yield a sample for each row, its number as key; a null is left out. Raises SampleError, InputError."""
    try:
        values = [rows.column(column.name).to_pylist() for column in columns]
    except UnicodeDecodeError as exn:
        raise InputError(f"a text is not UTF-8 ({exn})", remedy="leave its column out with --columns") from exn
    for number, row in zip(numbers, zip(*values, strict=True), strict=True):
        key = _KEY % number
        members = (column.member(key, value) for column, value in zip(columns, row, strict=True) if value is not None)
        yield checked(Sample(key, tuple(members)))


def _sizes(rows: pa.Table, columns: Sequence[Column]) -> Iterator[int]:
    """Yield the size of each row's sample in a tar, in bytes; JSON's is estimated by Arrow's."""
    lengths = [column.lengths(rows.column(column.name)) for column in columns]
    names = [len(column.extension or f"{column.name}.jpeg") + _KEY_CHARS + 1 for column in columns]
    for row in zip(*lengths, strict=True):
        yield sum(member_bytes(name, size) for name, size in zip(names, row, strict=True) if size is not None)


def _kind(type_: pa.DataType) -> ColumnKind:
    types = pa.types
    if types.is_struct(type_) and {field.name for field in type_} == {"bytes", "path"}:
        return "file"
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_):
        return "bytes"
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    return "number" if types.is_integer(type_) else "json"


def _dtype(type_: pa.DataType) -> str | None:
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return str(type_.value_type) if is_list and pa.types.is_integer(type_.value_type) else None


def _file_size(path: str | None) -> int | None:
    return None if path is None else fact_of(Path(path))[1]


def _file_content(value: Mapping[str, Any]) -> bytes:
    if value["bytes"] is not None:
        return bytes(value["bytes"])
    try:
        return Path(value["path"]).read_bytes()
    except OSError as exn:
        raise unreadable(exn, Path(value["path"])) from exn
    except TypeError:
        raise InputError("a value has neither bytes nor a path", remedy="drop such rows") from None


Batch: TypeAlias = "tuple[pa.Table, list[Column], Sequence[int]]"
"""Rows, their columns, and their numbers in the input."""


class _Table(ABC):
    """Rows in blocks; a position is (place of the block, row in it). A sample's key is its row's number."""

    _blocks: Sequence[Any]

    @abstractmethod
    def _batches(self, place: int, skip: int) -> Iterator[Batch]:
        """Yield the rows of a block after the first `skip`."""

    def positions(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """As `Source.positions`."""
        for place in range(len(self._blocks)):
            row = 0
            for batch, columns, _ in self._batches(place, 0):
                for size_bytes in _sizes(batch, columns):
                    yield size_bytes, (place, row)
                    row += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """As `Source.read`."""
        for place in range(first[0], last[0] + 1):
            row = first[1] if place == first[0] else 0
            for batch, columns, numbers in self._batches(place, row):
                used = min(batch.num_rows, last[1] + 1 - row) if place == last[0] else batch.num_rows
                yield from samples(batch.slice(0, used), columns, numbers[:used])
                row += used
                if place == last[0] and row > last[1]:
                    break


class Parquet(_Table):
    """The rows of parquet files, one after another, counted from 0 through all files; a block is a row group.

    With a seed, the row groups come in random order, and the rows of each, too; each is then in memory as a whole.

    Args:
        files: facts of each file.
        columns: column → extension; all columns if empty.
        seed: the seed of the order, or None for that of the files.
    """

    def __init__(self, files: Sequence[Sequence[Any]], columns: Mapping[str, str], seed: int | None) -> None:
        self._files = files
        self._wanted = columns
        self._seed = seed
        self._blocks: list[tuple[int, int, int, int]] = []  # file, row group, number of its first row, rows
        number = 0
        for file, fact in enumerate(files):
            with _opened(fact) as parquet:
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    self._blocks.append((file, group, number, rows))
                    number += rows
        if seed is not None:
            random.Random(seed).shuffle(self._blocks)

    def _batches(self, place: int, skip: int) -> Iterator[Batch]:
        file, group, number, rows = self._blocks[place]
        with _opened(self._files[file]) as parquet:
            columns = columns_of(parquet.schema_arrow, self._wanted, self._files[file][0])
            names = [column.name for column in columns]
            if self._seed is not None:
                order = list(range(rows))
                random.Random(f"{self._seed}/{number}").shuffle(order)
                table = parquet.read_row_group(group, columns=names)
                for start in range(skip, rows, _BLOCK_ROWS):
                    chosen = order[start : start + _BLOCK_ROWS]
                    yield table.take(chosen), columns, [number + row for row in chosen]
                return
            at = 0
            for batch in parquet.iter_batches(_BLOCK_ROWS, row_groups=[group], columns=names):
                behind = at + batch.num_rows
                if behind > skip:
                    dropped = max(0, skip - at)
                    rest = pa.Table.from_batches([batch.slice(dropped)])
                    yield rest, columns, range(number + at + dropped, number + behind)
                at = behind


@contextmanager
def _opened(fact: Sequence[Any]) -> Iterator[pq.ParquetFile]:
    with open_unchanged(fact) as file:
        try:
            with pq.ParquetFile(file) as parquet:
                yield parquet
        except (pa.ArrowException, OSError) as exn:
            raise InputError(
                f"not a readable parquet file ({exn})", url=fact[0], remedy="write the file again, or leave it out"
            ) from exn


class HuggingFace(_Table):
    """The rows of one split of a dataset, read from mapped Arrow files.

    With a seed, blocks of rows come in random order, and the rows of each, too.

    Args:
        name: folder of a dataset written by `save_to_disk`, or `hf:` and a name on the hub.
        split: the split, if there are several.
        columns: column → extension; all columns if empty.
        seed: the seed of the order, or None for the dataset's own.
    """

    def __init__(self, name: str, split: str | None, columns: Mapping[str, str], seed: int | None) -> None:
        found = _loaded(name, split)
        self.identity = str(found._fingerprint)
        rows = found.with_format("arrow")
        self._columns = columns_of(rows.features.arrow_schema, columns, name)
        self._rows = rows.select_columns([column.name for column in self._columns])
        self._seed = seed
        self._blocks = list(range(0, len(self._rows), _BLOCK_ROWS))
        if seed is not None:
            random.Random(seed).shuffle(self._blocks)

    def _batches(self, place: int, skip: int) -> Iterator[Batch]:
        start = self._blocks[place]
        numbers: Sequence[int] = range(start, min(start + _BLOCK_ROWS, len(self._rows)))
        if self._seed is not None:
            numbers = random.Random(f"{self._seed}/{start}").sample(numbers, len(numbers))
        numbers = numbers[skip:]
        rows = self._rows[numbers.start : numbers.stop] if isinstance(numbers, range) else self._rows[numbers]
        yield rows, self._columns, numbers


def _loaded(name: str, split: str | None) -> datasets.Dataset:
    import datasets  # only users of such datasets need it

    try:
        if name.startswith(HUB):
            found = datasets.load_dataset(name.removeprefix(HUB), split=split)
        else:
            found = datasets.load_from_disk(name)
            if isinstance(found, datasets.DatasetDict) and split in found:
                return found[split]
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as exn:
        raise InputError(f"cannot load the dataset ({exn})", url=name, remedy="check its name and --split") from exn
    if isinstance(found, Mapping):
        raise ConfigError(
            f"the dataset has several splits, and {split or 'none'} is chosen",
            url=name,
            remedy=f"choose one with --split: {', '.join(found)}",
        )
    return found
