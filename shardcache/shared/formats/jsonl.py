"""JSON Lines: each line is a JSON object, and a sample; its fields are the columns.

The index says where the value of each field is, so that a reader decodes only the values that it
wants. A column has a field's values in all lines, and a cell is the text of a value. An empty line
is not a sample. A field `__key__` is the sample's key; without such a field, the key is the
sample's number. A field `__url__` is left out. A fault is the reason why a single sample is
unusable although its shard is intact.

A line may have several fields of the same name. `json.loads` then gives the last value, in the
place of the first among the keys of the dict. So that readers get the same, the index has the first
value and the last: a reader sets the key twice, and a dict keeps the place of the first time.
"""

import json
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from shardcache.shared.exceptions import UnsupportedShardError
from shardcache.shared.formats.cells import BAD, KEY, RESERVED, URL, CellTable
from shardcache.shared.formats.format import (
    Decoder,
    Format,
    IndexOptions,
    RowsDecoder,
    with_compressions,
)
from shardcache.shared.tarindex.tables import Fault, Samples

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Limit for a line; indexing a line takes a small multiple of its size in memory."""

_BUFFER_BYTES = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON = "json"  # encoding of all values
_FAULTY_LINE = "json"  # name of the column of a fault that is about a whole line

# These match the beginning of an object, the name of a field with the colon, and what follows the
# field's value: a comma or a brace. The group in the first is the closing brace of an empty object.
_match_beginning = re.compile(r"[ \t\r\n]*\{(?:[ \t\r\n]*(\}))?").match
_match_name = re.compile(r'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:[ \t\r\n]*').match
_match_delimiter = re.compile(r"[ \t\r\n]*([,}])").match
# Splits lines of objects at the beginning of each but the first. `str.replace` would take several
# times as long.
_split_lines = re.compile(r"\n\{").split
# `_scan(text, at)` returns the value at an offset of a text, and the offset of the value's end.
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

# By the number of a field's column, the offsets in the file of its value's start and end.
_Places = dict[int, tuple[int, int]]


class JsonLinesFormat(Format):
    """JSON Lines."""

    name = "JSONL"
    suffixes = with_compressions(".jsonl", ".ndjson")
    is_common_outside_datasets = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`.

        A line that is not a JSON object, or has a field `__bad__` or an unusable `__key__`, is
        recorded as a fault. Raises UnsupportedShardError for too many lines or values, or too long
        a line.
        """
        lines = _LineIndexer(url)
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            lines.add_all(file)
        samples = lines.table.samples
        samples.encodings = [_JSON] * len(samples.extensions)
        return samples

    def decoder(self, encoding: str) -> Decoder | None:
        """As `Format.decoder`."""
        if encoding == _JSON:
            return _value
        return super().decoder(encoding)

    def rows_decoder(self, columns: Sequence[str]) -> RowsDecoder:
        """As `Format.rows_decoder`."""
        return _rows_decoder(columns)


JSON_LINES = JsonLinesFormat()


def _value(cell: bytes) -> Any:
    """Return the value of a cell, as `json.loads` does. Raises ValueError."""
    text = cell.decode()
    # A fast path, since readers call this for each field of each line: a string without escapes is
    # the text between the quotes.
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
    line, such as `1, "b": 2}\\n{"a": 3, "b": 4`. To make it a list, it adds the text before the
    first value, `[{"a": `, commas between the lines, and `}]`.
    """
    # Each object is to become the sample itself. So it begins with the fields that every sample
    # has, whose values the caller sets. Until then they are null, which is parsed fastest.
    object_begin = f'{{"{KEY}":null,"{URL}":null,'
    list_begins = [f"[{object_begin}{json.dumps(name)}:" for name in columns]
    between_objects = "," + object_begin

    def decode(first_column: int, cells: bytes) -> list[dict[str, Any]]:
        lines = cells.decode()
        # Line breaks occur only between objects, since each line is one object.
        if "\n" in lines:
            lines = between_objects.join(_split_lines(lines))
        text = f"{list_begins[first_column]}{lines}}}]"
        samples: list[dict[str, Any]]
        samples, end = _scan(text, 0)
        if end != len(text):
            raise ValueError("data after the objects")
        return samples

    return decode


class _LineIndexer:
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

    def add_all(self, file: BinaryIO) -> None:
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
            # Reserved fields are not cells. If one is repeated, the last value counts.
            first_place = fields.pop(column)
            value_start, value_end = repeated.pop(column, first_place)
            if name == KEY:
                key = _key_in(line[value_start - start : value_end - start])
            is_bad_key = name == KEY and key is None
            if name == BAD or is_bad_key:
                self.table.add_fault(Fault.RESERVED, name)
                return
        cells = list(fields.items())
        if repeated:
            # `_rows_decoder` needs cells in the order of the file.
            cells.extend(repeated.items())
            cells.sort(key=itemgetter(1))
        self.table.add(cells, key)

    def _fields(self, text: str, start: int) -> tuple[_Places, _Places]:
        """Return the places of the fields' first values, and of the repeated fields' last values.

        Raises ValueError, StopIteration or RecursionError if the text is not an object.

        Args:
            text: a line, with a character for each byte.
            start: offset of the line in the file.
        """
        fields: _Places = {}
        repeated: _Places = {}
        beginning = _match_beginning(text)
        if beginning is None:
            raise ValueError("not an object")
        at = beginning.end()
        delimiter = beginning[1]
        while delimiter != "}":
            name = _match_name(text, at)
            if name is None:
                raise ValueError("a field without a name")
            value_start = name.end()
            _, value_end = _scan(text, value_start)
            column = self._column(name[1])
            place = (start + value_start, start + value_end)
            if column in fields:
                repeated[column] = place
            else:
                fields[column] = place

            after_value = _match_delimiter(text, value_end)
            if after_value is None:
                raise ValueError("a field without an end")
            at = after_value.end()
            delimiter = after_value[1]
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
    key = _value(cell)
    if not isinstance(key, str) or not key:
        return None
    try:
        return key.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return None
