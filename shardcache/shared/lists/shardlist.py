"""Reader and writer of index files in wids format: every shard with its number of samples.

The format comes from webdataset 0.2's `wids` package: `{"wids_version": 1, "shardlist": [{"url",
"nsamples", "filesize"}, ...]}`, with urls that are absolute or relative to the file. There are two
more fields, which wids ignores. `etag` is the shard's version in the object store, to which the
numbers belong. `ntokens` is the number of tokens in the shard, if it has any.
"""

import io
import json
import posixpath
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from shardcache.shared.lists.json_stream import JsonText
from shardcache.shared.lists.shard_columns import ShardColumns
from shardcache.shared.protocol import ShardRef

KIND = "wids-shard-index-v1"
"""Value of the index's member `__kind__`."""

WIDS_VERSION = 1

MAX_SHARDS = 2_000_000
"""Maximum number of shards of an index.

A million shards of 100 MB are 100 TB. Each shard takes about 250 bytes of memory while the list of
a dataset's shards is built.
"""

_COUNTS = ("filesize", "nsamples", "ntokens")  # in the order of `ShardColumns`
_ETAG_TYPES = {str, type(None)}
_TOO_LARGE = 2**63  # the numbers in a list of shards have 64 bits and a sign
_SHOWN_CHARS = 100  # number of characters of a wrong row that an error shows


def write(shards: Iterable[ShardRef], relative_to: str | None = None) -> str:
    """Return an index, with one shard per line.

    Args:
        shards: shards with all of their numbers known.
        relative_to: url of a folder; urls below the folder are written relative to it. None to
            write all urls absolute.
    """
    rows = ",\n".join("  " + _row(shard, relative_to) for shard in shards)
    lines = (
        "{",
        f' "__kind__": "{KIND}",',
        f' "wids_version": {WIDS_VERSION},',
        ' "shardlist": [',
        rows,
        " ]",
        "}",
    )
    return "\n".join(lines) + "\n"


def _row(shard: ShardRef, relative_to: str | None) -> str:
    """Return a shard's row as JSON; `relative_to` is as for `write`."""
    url = shard.url
    if relative_to is not None:
        url = _relative(url, relative_to.rstrip("/") + "/")
    row = {
        "url": url,
        "nsamples": shard.samples,
        "filesize": shard.size_bytes,
        "etag": shard.version,
    }
    if shard.tokens is not None:
        row["ntokens"] = shard.tokens
    return json.dumps(row, ensure_ascii=False)


def _relative(url: str, folder: str) -> str:
    """Return a url relative to a folder's, which ends in "/"; unchanged if that is not possible."""
    if not url.startswith(folder):
        return url
    path = url.removeprefix(folder)
    # Readers normalise relative urls, which would change a key that contains `//` or `./`.
    if path != posixpath.normpath(path) or path.startswith(("/", ".")):
        return url
    return path


def read(data: bytes, max_shards: int = MAX_SHARDS) -> Iterator[ShardColumns]:
    """Yield the shards of an index in its order, many at a time, with urls and etags as written.

    The file is parsed in pieces: to parse it at once would take up to thirty times its size in
    memory, and block the interpreter.

    Raises ValueError, with a reason, for a file that is not an index, that lists more than
    `max_shards`, or that refers to further datasets.
    """
    source = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="")
    text = JsonText(source)
    has_list = False
    for name in text.members():
        # A "shardlist" that is not a list counts as missing: it is ignored, as unknown members are.
        if name == "shardlist" and text.comes_next("["):
            if has_list:
                raise ValueError('it has more than one "shardlist"')
            has_list = True
            yield from _listed_shards(text, max_shards)
            continue
        value = text.read_value()
        if name == "wids_version" and value != WIDS_VERSION:
            raise ValueError(f"it has wids_version {value!r}; only {WIDS_VERSION} is supported")
        if name == "datasets" and isinstance(value, list) and value:
            raise ValueError("it refers to further datasets, which is not supported")
    if not has_list:
        raise ValueError('it has no "shardlist"')


def _listed_shards(text: JsonText, max_shards: int) -> Iterator[ShardColumns]:
    """Yield the shards of the "shardlist", many at a time. Raises ValueError as `read` does."""
    count = 0
    for rows in text.items():
        count += len(rows)
        if count > max_shards:
            raise ValueError(f"it lists more than {max_shards:,} shards")
        yield _columns_of(rows)


def _columns_of(rows: list[Any]) -> ShardColumns:
    """Return the rows' columns. Raises ValueError for a malformed row.

    All rows are checked together, which is fast. Only if this check fails is each row checked on
    its own, to find the reason.
    """
    if _types_of(rows) == {dict}:
        names = ("url", "etag", *_COUNTS)
        columns = [[row.get(name) for row in rows] for name in names]
        if _are_sound(columns):
            return columns
    faults = filter(None, map(_fault_of, rows))
    # `_fault_of` has the same rules as `_are_sound`, so there is a fault.
    raise ValueError(next(faults))


def _are_sound(columns: ShardColumns) -> bool:
    """Return whether all rows are well-formed, by the same rules as `_fault_of` but faster."""
    urls, etags, *count_columns = columns
    if _types_of(urls) != {str}:
        return False
    if not _types_of(etags).issubset(_ETAG_TYPES):
        return False
    counts = [count for count in chain(*count_columns) if count is not None]
    if not _types_of(counts).issubset({int}):
        return False
    return min(counts, default=0) >= 0 and max(counts, default=0) < _TOO_LARGE


def _types_of(values: Iterable[object]) -> set[type]:
    return set(map(type, values))


def _fault_of(row: Any) -> str:
    """Return what is wrong with a row; empty if nothing is."""
    url = row.get("url") if isinstance(row, dict) else None
    if type(url) is not str:
        return f"a row has no url: {str(row)[:_SHOWN_CHARS]}"
    etag = row.get("etag")
    if type(etag) not in _ETAG_TYPES:
        return f"etag of {url} is {etag!r}"
    for name in _COUNTS:
        count = row.get(name)
        if count is not None and not (type(count) is int and 0 <= count < _TOO_LARGE):
            return f"{name} of {url} is {count!r}"
    return ""
