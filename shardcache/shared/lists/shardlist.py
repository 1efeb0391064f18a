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
from typing import Any

from shardcache.shared.lists.json_stream import JsonText
from shardcache.shared.lists.shard_columns import ShardColumns
from shardcache.shared.protocol import ShardRef

KIND = "wids-shard-index-v1"
WIDS_VERSION = 1
# Maximum number of shards of an index. A million shards of 100 MB are 100 TB. Each shard takes
# about 250 bytes of memory while a manifest is built.
MAX_SHARDS = 2_000_000

_COUNTS = ("filesize", "nsamples", "ntokens")  # in the order of `ShardColumns`
_ETAG_TYPES = {str, type(None)}
_MAX_COUNT = 2**63
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
    memory, and block the interpreter. Raises ValueError, with a reason, for a file that is not an
    index, that lists more than `max_shards`, or that refers to further datasets.
    """
    source = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="")
    text = JsonText(source)
    count = None
    for name in text.members():
        # A "shardlist" that is no list is read like the members that are ignored, so it counts as
        # missing.
        if name == "shardlist" and text.begins("["):
            if count is not None:
                raise ValueError('it has more than one "shardlist"')
            count = 0
            for rows in text.items():  # many rows at a time
                count += len(rows)
                if count > max_shards:
                    raise ValueError(f"it lists more than {max_shards:,} shards")
                yield _columns(rows)
            continue
        value = text.value()
        if name == "wids_version" and value != WIDS_VERSION:
            raise ValueError(f"it has wids_version {value!r}; only {WIDS_VERSION} is supported")
        if name == "datasets" and isinstance(value, list) and value:
            raise ValueError("it refers to further datasets, which is not supported")
    if count is None:
        raise ValueError('it has no "shardlist"')


def _columns(rows: list[Any]) -> ShardColumns:
    """Return the rows' columns. Raises ValueError for a malformed row.

    All rows are checked together, which is fast. Only if that check fails, each row is checked to
    find the reason.
    """
    if _types_of(rows) == {dict}:
        names = ("url", "etag", *_COUNTS)
        columns = [[row.get(name) for row in rows] for name in names]
        if _are_sound(columns):
            return columns
    faults = (fault for fault in map(_fault, rows) if fault)
    # `_fault` has the same rules as `_are_sound`, so there is a fault.
    raise ValueError(next(faults))


def _are_sound(columns: ShardColumns) -> bool:
    """Return whether all rows are well-formed, by the same rules as `_fault` but faster."""
    urls, etags, *counts = columns
    known = [count for column in counts for count in column if count is not None]
    are_urls_sound = _types_of(urls) == {str}
    are_etags_sound = _types_of(etags).issubset(_ETAG_TYPES)
    are_known_whole = _types_of(known).issubset({int})
    if not (are_urls_sound and are_etags_sound and are_known_whole):
        return False
    smallest = min(known, default=0)
    largest = max(known, default=0)
    return smallest >= 0 and largest < _MAX_COUNT


def _types_of(values: Iterable[object]) -> set[type]:
    return set(map(type, values))


def _fault(row: Any) -> str:
    """Return what is wrong with a row; empty if nothing is."""
    url = row.get("url") if isinstance(row, dict) else None
    if type(url) is not str:
        return f"a row has no url: {str(row)[:_SHOWN_CHARS]}"
    etag = row.get("etag")
    if type(etag) not in _ETAG_TYPES:
        return f"etag of {url} is {etag!r}"
    for name in _COUNTS:
        count = row.get(name)
        if count is not None and not (type(count) is int and 0 <= count < _MAX_COUNT):
            return f"{name} of {url} is {count!r}"
    return ""
