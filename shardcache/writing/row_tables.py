"""Tables as an input: each row of parquet files, or of Hugging Face's datasets, becomes a sample.

Needs pyarrow.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardcache.errors import ConfigError, InputError
from shardcache.writing.sample_tar import (
    Sample,
    as_json,
    as_npy,
    checked,
    encoded,
    member_bytes,
    utf8,
)
from shardcache.writing.sources import HUB, fact_of, open_unchanged, unreadable

if TYPE_CHECKING:
    import datasets

_BLOCK_ROWS = 1024  # rows that are read at a time
_KEY = "%09d"  # of a sample, made of its row's number
_TYPICAL_NUMBER_BYTES = 8  # of an integer as text
# Of files in these formats: an offset, the bytes there, and the extension.
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
"""Kind of a column's values, which decides how they are written.

"file" is bytes, or the path of a file, as in the features Image, Audio and Video of Hugging Face's
datasets; "number" is an integer, "json" anything else.
"""

_EXTENSIONS: Mapping[ColumnKind, str] = {"text": "txt", "number": "cls", "json": "json"}


@dataclass(frozen=True, slots=True)
class MemberColumn:
    """A column and the member that it becomes.

    Attributes:
        name: of the column.
        kind: of its values.
        extension: of the member; None if each value's first bytes tell it.
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
        _, _, suffix = self.extension.rpartition(".")
        if self.kind == "json" and suffix == "json":
            return self.extension, as_json(value)
        if self.kind == "text":  # JSON in a column of texts is JSON already
            return self.extension, utf8(value)
        if self.dtype is not None and suffix == "npy":
            # The type of an empty list does not show in its values.
            return self.extension, as_npy(value, self.dtype)
        return self.extension, encoded(key, self.extension, value)

    def lengths(self, values: pa.ChunkedArray) -> list[int | None]:
        """Return the length of each value as a member, or None for a null.

        Those of numbers and JSON are estimates.
        """
        if self.kind in ("bytes", "text"):
            return pc.binary_length(values).to_pylist()  # type: ignore[no-any-return]
        if self.kind == "file":
            return _file_lengths(values)
        mean_bytes = _TYPICAL_NUMBER_BYTES
        if self.kind == "json":
            mean_bytes = values.nbytes // max(1, len(values))
        return [None if null else mean_bytes for null in values.is_null().to_pylist()]


def _file_lengths(values: pa.ChunkedArray) -> list[int | None]:
    """Return the length of each file, whose bytes a value has, or its path."""
    lengths: list[int | None] = pc.binary_length(pc.struct_field(values, "bytes")).to_pylist()
    if None not in lengths:
        return lengths
    paths = pc.struct_field(values, "path").to_pylist()
    for number, path in enumerate(paths):
        if lengths[number] is None and path:
            _, lengths[number], _ = fact_of(Path(path))
    return lengths


def columns_of(schema: pa.Schema, wanted: Mapping[str, str], url: str) -> list[MemberColumn]:
    """Return the columns to write: those wanted or, if none is, all, as `<column>.<kind>`.

    Args:
        schema: of the table.
        wanted: column → extension.
        url: of the table, for errors.

    Raises ConfigError for a column that does not exist, or whose name is not an extension, or that
    of another.
    """
    unknown = sorted(wanted.keys() - set(schema.names))
    if unknown:
        raise ConfigError(
            f"there is no column {unknown[0]!r}",
            url=url,
            remedy=f"the columns are: {', '.join(schema.names)}",
        )
    for name in wanted or schema.names:
        if schema.names.count(name) > 1:
            raise ConfigError(
                f"two columns have the name {name!r}",
                url=url,
                remedy="rename one of them, or leave both out: --columns image=jpg,label=cls "
                "names those to write",
            )
        if not wanted and ("/" in name or name.startswith("__")):
            raise ConfigError(
                f"readers would not find a member named after the column {name!r}",
                url=url,
                remedy="choose columns and extensions: --columns image=jpg,label=cls",
            )

    found = []
    for name in wanted or schema.names:
        type_ = schema.field(name).type
        kind = _kind(type_)
        usual = f"{name}.{_EXTENSIONS[kind]}" if kind in _EXTENSIONS else None
        found.append(MemberColumn(name, kind, wanted.get(name, usual), _dtype(type_)))
    return found


def samples(
    rows: pa.Table, columns: Sequence[MemberColumn], numbers: Iterable[int]
) -> Iterator[Sample]:
    """Yield a sample for each row, its number as key; a null is left out.

    Raises SampleError, InputError.
    """
    try:
        values = [rows.column(column.name).to_pylist() for column in columns]
    except UnicodeDecodeError as exn:
        raise InputError(
            f"a text is not UTF-8 ({exn})",
            remedy="leave its column out with --columns",
        ) from exn
    for number, row in zip(numbers, zip(*values, strict=True), strict=True):
        key = _KEY % number
        members = []
        for column, value in zip(columns, row, strict=True):
            if value is not None:
                members.append(column.member(key, value))
        yield checked(Sample(key, tuple(members)))


def _sizes(rows: pa.Table, columns: Sequence[MemberColumn]) -> Iterator[int]:
    """Yield the size of each row's sample in a tar, in bytes; JSON's is estimated by Arrow's."""
    lengths = [column.lengths(rows.column(column.name)) for column in columns]
    # No extension that values' first bytes tell is longer than this one.
    names = [column.extension or f"{column.name}.jpeg" for column in columns]
    name_bytes = [len(f"{_KEY % 0}.{name}") for name in names]
    for row in zip(*lengths, strict=True):
        size_bytes = 0
        for name, value in zip(name_bytes, row, strict=True):
            if value is not None:
                size_bytes += member_bytes(name, value)
        yield size_bytes


def _kind(type_: pa.DataType) -> ColumnKind:
    """Return the kind of a column of Arrow's type."""
    types = pa.types
    if types.is_struct(type_) and {field.name for field in type_} == {"bytes", "path"}:
        return "file"
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_):
        return "bytes"
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    return "number" if types.is_integer(type_) else "json"


def _dtype(type_: pa.DataType) -> str | None:
    """Return the type of the integers in a column of lists; None for any other column."""
    types = pa.types
    is_list = types.is_list(type_) or types.is_large_list(type_)
    if not is_list and not types.is_fixed_size_list(type_):
        return None
    return str(type_.value_type) if types.is_integer(type_.value_type) else None


def _file_content(value: Mapping[str, Any]) -> bytes:
    if value["bytes"] is not None:
        return bytes(value["bytes"])
    if value["path"] is None:
        raise InputError("a value has neither bytes nor a path", remedy="drop such rows")
    try:
        return Path(value["path"]).read_bytes()
    except OSError as exn:
        raise unreadable(exn, Path(value["path"])) from exn


class _RowBlocks(ABC):
    """Rows in blocks; a position is (place of the block, row in it).

    A sample's key is its row's number. With a seed, the blocks come in random order, and the rows
    of each, too; each is then in memory as a whole.
    """

    def __init__(self, blocks: list[range], seed: int | None) -> None:
        """Take the blocks, each the numbers of its rows, and the seed of a random order."""
        self._blocks = blocks
        self._seed = seed
        if seed is not None:
            random.Random(seed).shuffle(self._blocks)

    @abstractmethod
    def _rows(
        self, block: range, *, at_once: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        """Yield the rows of a block, in their order, a few at a time if not `at_once`."""

    def _batches(self, place: int) -> Iterator[tuple[list[MemberColumn], pa.Table, Sequence[int]]]:
        """Yield the columns, some rows, and the rows' numbers: those of a block, in its order."""
        block = self._blocks[place]
        if self._seed is None:
            first = block.start
            for columns, rows in self._rows(block, at_once=False):
                yield columns, rows, range(first, first + rows.num_rows)
                first += rows.num_rows
            return
        order = list(range(len(block)))
        random.Random(f"{self._seed}/{block.start}").shuffle(order)
        for columns, rows in self._rows(block, at_once=True):
            for start in range(0, len(order), _BLOCK_ROWS):
                chosen = order[start : start + _BLOCK_ROWS]
                yield columns, rows.take(chosen), [block[row] for row in chosen]

    def positions(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """As `Source.positions`."""
        for place in range(len(self._blocks)):
            row = 0
            for columns, rows, _ in self._batches(place):
                for size_bytes in _sizes(rows, columns):
                    yield size_bytes, (place, row)
                    row += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """As `Source.read`."""
        first_place, first_row = first
        last_place, last_row = last
        for place in range(first_place, last_place + 1):
            # Rows of the block to skip, and those up to the last to be read: both counted from the
            # rows that come next.
            skip = first_row if place == first_place else 0
            left = last_row + 1 if place == last_place else len(self._blocks[place])
            for columns, rows, numbers in self._batches(place):
                begin = min(skip, len(numbers))
                end = min(left, len(numbers))
                yield from samples(rows.slice(begin, end - begin), columns, numbers[begin:end])
                skip -= begin
                left -= end
                if left == 0:
                    break


class Parquet(_RowBlocks):
    """The rows of parquet files, counted from 0 through all files. A block is a row group."""

    def __init__(
        self,
        files: Sequence[Sequence[Any]],
        columns: Mapping[str, str],
        seed: int | None,
    ) -> None:
        self._wanted = columns
        # The file's facts and the number of the row group, by the numbers of its rows.
        self._groups: dict[range, tuple[Sequence[Any], int]] = {}
        number = 0
        for fact in files:
            with _opened(fact) as parquet:
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    self._groups[range(number, number + rows)] = fact, group
                    number += rows
        super().__init__(list(self._groups), seed)

    def _rows(
        self, block: range, *, at_once: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        fact, group = self._groups[block]
        with _opened(fact) as parquet:
            columns = columns_of(parquet.schema_arrow, self._wanted, fact[0])
            names = [column.name for column in columns]
            if at_once:
                yield columns, parquet.read_row_group(group, columns=names)
                return
            for batch in parquet.iter_batches(_BLOCK_ROWS, row_groups=[group], columns=names):
                yield columns, pa.Table.from_batches([batch])


@contextmanager
def _opened(fact: Sequence[Any]) -> Iterator[pq.ParquetFile]:
    """Open a parquet file that is still as its facts say. Raises InputError."""
    with open_unchanged(fact) as file:
        try:
            with pq.ParquetFile(file) as parquet:
                yield parquet
        except (pa.ArrowException, OSError) as exn:
            raise InputError(
                f"not a readable parquet file ({exn})",
                url=fact[0],
                remedy="write the file again, or leave it out",
            ) from exn


class HuggingFace(_RowBlocks):
    """The rows of one split of a dataset, read from mapped Arrow files.

    The dataset is on the hub, or in a folder by `save_to_disk`.
    """

    def __init__(
        self,
        name: str,
        split: str | None,
        columns: Mapping[str, str],
        seed: int | None,
    ) -> None:
        found = _loaded(name, split)
        self.identity = str(found._fingerprint)  # noqa: SLF001  # datasets say it nowhere else
        rows = found.with_format("arrow")
        self._columns = columns_of(rows.features.arrow_schema, columns, name)
        self._dataset = rows.select_columns([column.name for column in self._columns])
        numbers = range(len(self._dataset))
        super().__init__([numbers[at : at + _BLOCK_ROWS] for at in numbers[::_BLOCK_ROWS]], seed)

    def _rows(
        self, block: range, *, at_once: bool
    ) -> Iterator[tuple[list[MemberColumn], pa.Table]]:
        yield self._columns, self._dataset[block.start : block.stop]


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
        raise InputError(
            f"cannot load the dataset ({exn})",
            url=name,
            remedy="check its name and --split",
        ) from exn
    if isinstance(found, Mapping):
        raise ConfigError(
            f"the dataset has several splits, and {split or 'none'} is chosen",
            url=name,
            remedy=f"choose one with --split: {', '.join(found)}",
        )
    return found
