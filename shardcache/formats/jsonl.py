"""JSON Lines: each line is an object, and a sample; its fields are the columns.

The index says where the value of each field is, so that a reader decodes only the values that it
wants. An empty line is not a sample. A field `__key__` is the sample's key; without such a field,
the key is the sample's number. A field `__url__` is left out. A column has a field's values in all
lines, and a cell is the text of a value.

A line may have several fields of the same name. As with `json.loads`, the sample has the last value
at the place of the first one. So the index has both: a reader sets a field twice, and a dict keeps
the place at which a field was first set.
"""

import json
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from shardcache.errors import UnsupportedShardError
from shardcache.formats.cells import BAD, KEY, RESERVED, URL, CellTable
from shardcache.formats.format import (
    Decoder,
    Format,
    IndexOptions,
    RowsDecoder,
    with_compressions,
)
from shardcache.tarindex.tables import Fault, Samples

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Limit for a line; indexing a line takes a small multiple of its size in memory."""

_BUFFER_BYTES = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON = "json"  # encoding of all values
_FAULTY_LINE = "json"  # name of the column of a fault that is about a whole line

# Matches the beginning of an object. The group is the closing brace of an empty object.
_begin_object = re.compile(r"[ \t\r\n]*\{(?:[ \t\r\n]*(\}))?").match
# Match the name of a field with the colon, and the sign after a field's value.
_name_of_field = re.compile(r'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:[ \t\r\n]*').match
_sign_after_value = re.compile(r"[ \t\r\n]*([,}])").match
# Splits lines of objects at their beginnings. `str.replace` would take several times as long.
_split_lines = re.compile(r"\n\{").split
# `_scan(text, at)` returns the value at an offset of a text, and the offset of the value's end.
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

_Places = dict[int, tuple[int, int]]  # by the number of its column, start and end of a value


def index(path: Path, url: str) -> Samples:
    """Return the samples of the lines of the file at `path`. Blocks.

    A line that is not a JSON object, or has a reserved field, is recorded as a fault.

    Raises OSError; UnsupportedShardError for too many lines or values, or too long a line.
    """
    lines = _Lines(url)
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        lines.read(file)
    samples = lines.table.samples
    samples.encodings = [_JSON] * len(samples.extensions)
    return samples


def value(cell: bytes) -> Any:
    """Return the value of a cell, as `json.loads` does. Raises ValueError."""
    # Plain strings have a fast path, since readers call this for each field of each line.
    text = cell.decode()
    # A string without escapes is its own text between the quotes.
    if text.startswith('"') and "\\" not in text:
        return text[1:-1]
    try:
        decoded, end = _scan(text, 0)
    except (StopIteration, RecursionError) as exn:
        raise ValueError("not a JSON value") from exn
    if end != len(text):
        raise ValueError("data after the JSON value")
    return decoded


def _rows_decoder(columns: Sequence[str]) -> RowsDecoder:
    """Return the decoder of consecutive lines, which parses them as one list of objects.

    The decoder gets the bytes from the first value of the first line to the last value of the last
    line. The decoder adds the text before the first value, and the text after the last value.
    """
    # Each object is to become the sample itself. So it begins with the fields that every sample
    # has, whose values the caller sets. Until then they are null, which is parsed fastest.
    first_fields = f'{{"{KEY}":null,"{URL}":null,'
    begins = [f"[{first_fields}{json.dumps(name)}:" for name in columns]
    next_line = "," + first_fields

    def decode(first: int, cells: bytes) -> list[dict[str, Any]]:
        lines = cells.decode()
        # Line breaks occur only between objects, since each line is one object.
        if "\n" in lines:
            lines = next_line.join(_split_lines(lines))
        text = f"{begins[first]}{lines}}}]"
        samples: list[dict[str, Any]]
        samples, end = _scan(text, 0)
        if end != len(text):
            raise ValueError("data after the objects")
        return samples

    return decode


class JsonLinesFormat(Format):
    """JSON Lines."""

    name = "JSONL"
    suffixes = with_compressions(".jsonl", ".ndjson")
    is_common_outside_datasets = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`."""
        return index(path, url)

    def decoder(self, encoding: str) -> Decoder | None:
        """As `Format.decoder`."""
        return value if encoding == _JSON else super().decoder(encoding)

    def rows_decoder(self, columns: Sequence[str]) -> RowsDecoder:
        """As `Format.rows_decoder`."""
        return _rows_decoder(columns)


class _Lines:
    """Indexes lines one by one.

    Attributes:
        table: the samples of the lines read so far.
    """

    def __init__(self, url: str) -> None:
        self.table = CellTable(url)
        self._url = url
        # Numbers of columns, by the name of the field as written in the file, with its quotes.
        self._columns: dict[str, int] = {}
        # By number, the names of columns such as `__key__`, which are not members.
        self._reserved: dict[int, str] = {}

    def read(self, file: BinaryIO) -> None:
        """Add all lines of a file."""
        start = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise UnsupportedShardError(
                    f"the line at byte {start} has more than {MAX_LINE_BYTES >> 20} MiB",
                    url=self._url,
                    remedy="write one JSON object per line",
                )
            end = start + len(line)
            if start == 0 and line.startswith(_BYTE_ORDER_MARK):
                start = len(_BYTE_ORDER_MARK)
                line = line[start:]
            if line.strip(b" \t\r\n"):
                self._add(line, start)
            start = end

    def _add(self, line: bytes, start: int) -> None:
        """Add the line that begins at byte `start` as a sample, or as a fault if it is unusable."""
        try:
            if not line.isascii():
                line.decode()  # UnicodeDecodeError is a ValueError
            # Latin-1 makes each byte a character, so that offsets in the text are those of bytes.
            # Characters that are not ASCII occur only inside strings, where they do not matter.
            fields, repeated = self._fields(line.decode("latin-1"), start)
        except (ValueError, StopIteration, RecursionError):
            self.table.add_fault(Fault.JSON, _FAULTY_LINE)
            return

        key = None
        for column in self._reserved.keys() & fields.keys():
            name = self._reserved[column]
            first_place = fields.pop(column)
            value_start, value_end = repeated.pop(column, first_place)
            if name == KEY:
                key = _key_in(line[value_start - start : value_end - start])
            # A field `__bad__`, and a key that is not usable, make the sample unusable. A field
            # `__url__` has just been dropped.
            if name == BAD or (name == KEY and key is None):
                self.table.add_fault(Fault.RESERVED, name)
                return
        cells = list(fields.items())
        if repeated:
            # `_rows_decoder` relies on the order of the file.
            cells = sorted([*cells, *repeated.items()], key=itemgetter(1))
        self.table.add(cells, key)

    def _fields(self, text: str, start: int) -> tuple[_Places, _Places]:
        """Return the place of each field's first value, and of each repeated field's last value.

        Raises ValueError, StopIteration or RecursionError if the text is not an object.

        Args:
            text: a line, with a character for each byte.
            start: offset of the line in the file.
        """
        fields: _Places = {}
        repeated: _Places = {}
        begin = _begin_object(text)
        if begin is None:
            raise ValueError("not an object")
        at = begin.end()
        sign = begin[1]
        while sign != "}":
            name = _name_of_field(text, at)
            if name is None:
                raise ValueError("a field without a name")
            at = name.end()
            _, end = _scan(text, at)
            column = self._column(name[1])
            place = (start + at, start + end)
            if column in fields:
                repeated[column] = place
            else:
                fields[column] = place

            after_value = _sign_after_value(text, end)
            if after_value is None:
                raise ValueError("a field without an end")
            at = after_value.end()
            sign = after_value[1]
        if text[at:].strip(" \t\r\n"):
            raise ValueError("data after the object")
        return fields, repeated

    def _column(self, quoted_name: str) -> int:
        """Return the number of a field's column, given its name as written in the file.

        Raises ValueError for a name that is not valid text; UnsupportedShardError for too many
        columns.
        """
        column = self._columns.get(quoted_name)
        if column is None:
            name = json.loads(quoted_name.encode("latin-1"))
            column = self.table.column(name)  # raises ValueError for half a surrogate pair
            self._columns[quoted_name] = column
            if name in RESERVED:
                self._reserved[column] = name
        return column


def _key_in(cell: bytes) -> bytes | None:
    """Return the value of a field `__key__`, in UTF-8; None if it is not text, or is empty."""
    key = value(cell)
    if not isinstance(key, str) or not key:
        return None
    try:
        return key.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return None


JSON_LINES = JsonLinesFormat()
