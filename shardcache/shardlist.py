"""Reader and writer for index files in wids format, which list every shard of a dataset with its number of samples.

The format is that of webdataset 0.2's `wids` package: `{"wids_version": 1, "shardlist": [{"url", "nsamples",
"filesize"}, ...]}`, with urls absolute or relative to the file. Extra fields, which wids ignores: `etag` is the shard
version in the object store that the numbers belong to, and `ntokens` the number of tokens in the shard, if it has any.
"""

import io
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TextIO

from shardcache.protocol import ShardRef
from shardcache.shards import Columns

KIND = "wids-shard-index-v1"
WIDS_VERSION = 1
# A million shards of 100 MB are 100 TB. Each takes about 250 bytes of memory while a manifest is built.
MAX_SHARDS = 2_000_000

_WINDOW_CHARS = 256 * 1024
_AT_ONCE = 1_000
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_COUNTS = ("filesize", "nsamples", "ntokens")
_TEXT = {str, type(None)}


def write(shards: Iterable[ShardRef], relative_to: str | None = None) -> str:
    """Return an index of completely known shards, one per line, with urls relative to the url of a folder, if given."""
    rows = ",\n".join("  " + _row(shard, relative_to) for shard in shards)
    return f'{{\n "__kind__": "{KIND}",\n "wids_version": {WIDS_VERSION},\n "shardlist": [\n{rows}\n ]\n}}\n'


def _row(shard: ShardRef, relative_to: str | None) -> str:
    url = shard.url if relative_to is None else _relative(shard.url, relative_to.rstrip("/") + "/")
    row = {"url": url, "nsamples": shard.samples, "filesize": shard.size_bytes, "etag": shard.version}
    if shard.tokens is not None:
        row["ntokens"] = shard.tokens
    return json.dumps(row, ensure_ascii=False)


def _relative(url: str, folder: str) -> str:
    path = url.removeprefix(folder)
    # Readers normalise relative urls, which would change a key that contains `//` or `./`.
    return path if path == posixpath.normpath(path) and not path.startswith(("/", ".")) else url


def read(data: bytes, max_shards: int = MAX_SHARDS) -> Iterator[Columns]:
    """Yield the shards of an index in its order, some at a time, with urls and etags unchanged.

    Parsing the whole file at once would take up to thirty times its size in memory, and block the interpreter. Raises
    ValueError, with a reason, for a file that is not an index, that lists more than `max_shards`, or that refers to
    further datasets.
    """
    text, rows = _Text(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="")), -1
    for name in text.members():
        if name == "shardlist" and text.begins("["):
            rows = 0
            for some in text.items():
                rows += len(some)
                if rows > max_shards:
                    raise ValueError(f"it lists more than {max_shards:,} shards")
                yield _columns(some)
            continue
        value = text.value()
        if name == "wids_version" and value != WIDS_VERSION:
            raise ValueError(f"it has wids_version {value!r}; only {WIDS_VERSION} is supported")
        if name == "datasets" and isinstance(value, list) and value:
            raise ValueError("it refers to further datasets, which is not supported")
    if rows < 0:
        raise ValueError('it has no "shardlist"')


class _Text:
    """Incremental parser of a JSON object, with a sliding window over its text; no value may exceed the window."""

    def __init__(self, source: TextIO) -> None:
        self._source = source
        self._start = 0  # offset of the window in the text, in characters
        self._at = 0  # position in the window
        self._window = ""
        self._is_last = False
        self._is_read = False  # True once the whole window was read, or that was tried
        self._slide()

    def begins(self, mark: str) -> bool:
        """Return True if the rest of the text, after whitespace, begins with `mark`."""
        self._skip()
        return self._window.startswith(mark, self._at)

    def members(self) -> Iterator[str]:
        """Yield each member name of the top-level object; the caller reads its value."""
        for _ in self._list("{", "}"):
            name = self.value()
            self._take(":")
            yield str(name)
        self._skip()
        if self._at < len(self._window):
            raise self._error("unexpected text after the end")

    def items(self) -> Iterator[list[Any]]:
        """Yield the values of a list, some at a time."""
        some: list[Any] = []
        for _ in self._list("[", "]"):
            some += self._values() or [self.value()]
            if len(some) >= _AT_ONCE:
                yield some
                some = []
        if some:
            yield some

    def _values(self) -> list[Any]:
        """Read the objects that the window holds whole, if that is all it holds: much faster than one by one."""
        stop = self._window.rfind("]") if self._is_last else -1  # of the list, most likely
        end = self._window.rfind("}", self._at, None if stop < 0 else stop) + 1
        if not self._is_read and end > self._at:
            self._is_read = True
            with suppress(ValueError, RecursionError):
                values: list[Any] = json.loads(f"[{self._window[self._at : end]}]")
                self._at = end
                return values
        return []

    def value(self) -> Any:
        """Read one value."""
        self._skip()
        try:
            value, end = _DECODER.raw_decode(self._window, self._at)
        except json.JSONDecodeError as exn:
            if self._is_last:
                raise self._error(exn.msg, exn.pos) from None
        except RecursionError as exn:
            raise ValueError("it is nested too deeply") from exn
        else:
            if end < len(self._window) or self._is_last:  # else a number may continue in the next window
                self._at = end
                return value
        if not self._at:
            raise self._error(f"invalid JSON, or a value longer than {_WINDOW_CHARS:,} characters", 0)
        self._slide()
        return self.value()

    def _slide(self) -> None:
        rest = self._window[self._at :]
        more = self._source.read(_WINDOW_CHARS - len(rest))
        self._start, self._at, self._is_read = self._start + self._at, 0, False
        self._window, self._is_last = rest + more, len(rest) + len(more) < _WINDOW_CHARS

    def _list(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        if self.begins(closing):
            self._at += 1
            return
        while True:
            yield
            is_over = self.begins(closing)
            self._take(closing if is_over else ",")
            if is_over:
                return

    def _take(self, mark: str) -> None:
        if not self.begins(mark):
            raise self._error(f"{mark!r} is missing")
        self._at += 1

    def _skip(self) -> None:
        self._at = _SPACE.match(self._window, self._at).end()  # type: ignore[union-attr]  # it also matches ""
        while self._at == len(self._window) and not self._is_last:
            self._slide()
            self._at = _SPACE.match(self._window).end()  # type: ignore[union-attr]

    def _error(self, reason: str, at: int | None = None) -> ValueError:
        return ValueError(f"{reason}, at character {self._start + (self._at if at is None else at):,}")


def _columns(rows: list[Any]) -> Columns:
    """Return the rows' columns: checked all at once, and row by row, for the reason, only if one is at fault."""
    if {*map(type, rows)} == {dict}:
        urls, etags, *counts = columns = [[row.get(name) for row in rows] for name in ("url", "etag", *_COUNTS)]
        known = [count for each in counts for count in each if count is not None]
        typed = {*map(type, urls)} == {str} and {*map(type, etags)} <= _TEXT and {*map(type, known)} <= {int}
        if typed and 0 <= min(known, default=0) <= max(known, default=0) < 2**63:
            return columns
    raise ValueError(next(filter(None, map(_fault, rows))))


def _fault(row: Any) -> str:
    """Return what is wrong with a row; empty if nothing is."""
    if not isinstance(row, dict) or type(url := row.get("url")) is not str:
        return f"a row has no url: {str(row)[:100]}"
    if type(etag := row.get("etag")) not in _TEXT:
        return f"etag of {url} is {etag!r}"
    for name, count in zip(_COUNTS, map(row.get, _COUNTS), strict=True):
        if count is not None and not (type(count) is int and 0 <= count < 2**63):
            return f"{name} of {url} is {count!r}"
    return ""
