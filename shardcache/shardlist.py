"""Index files in wids format, read and written: every shard of a dataset with its number of samples.

The format is that of webdataset 0.2's `wids` package: `{"wids_version": 1, "shardlist": [{"url", "nsamples",
"filesize"}, ...]}`, urls absolute or relative to the file. `etag`, which wids does not know and leaves alone, is the
store's version of the shard that the other numbers belong to.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable
from typing import Any, TypeVar

from shardcache.protocol import ShardRef

KIND = "wids-shard-index-v1"
WIDS_VERSION = 1

Value = TypeVar("Value", str, int)


def write(shards: Iterable[ShardRef], relative_to: str | None = None) -> str:
    """Return an index of the shards, a line each.

    Args:
        shards: with every field known.
        relative_to: the folder, as a url, in which the file will lie; what lies below it is named from there.
    """
    rows = ",\n".join("  " + _row(shard, relative_to) for shard in shards)
    return f'{{\n "__kind__": "{KIND}",\n "wids_version": {WIDS_VERSION},\n "shardlist": [\n{rows}\n ]\n}}\n'


def _row(shard: ShardRef, relative_to: str | None) -> str:
    url = shard.url if relative_to is None else _relative(shard.url, relative_to.rstrip("/") + "/")
    row = {"url": url, "nsamples": shard.samples, "filesize": shard.size_bytes, "etag": shard.version}
    return json.dumps(row, ensure_ascii=False)


def _relative(url: str, folder: str) -> str:
    path = url.removeprefix(folder)
    # Readers normalise what is relative; a key with `//` or `./` in it would be another's.
    return path if path == posixpath.normpath(path) and not path.startswith(("/", ".")) else url


def read(data: bytes) -> list[ShardRef]:
    """Return the shards of an index in its order, urls and etags as they stand there.

    Raises ValueError with a sentence for what is no index, and for one that stands for more than its own list.
    """
    match _parse(data):
        case {"wids_version": version} if version != WIDS_VERSION:
            raise ValueError(f"it has wids_version {version!r}, known is {WIDS_VERSION}")
        case {"datasets": [_, *_]}:
            raise ValueError("it refers to further datasets, which are not followed")
        case {"shardlist": [*rows]}:
            return [_ref(row) for row in rows]
    raise ValueError('it has no "shardlist"')


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as exn:
        raise ValueError("it is nested too deep") from exn


def _ref(row: Any) -> ShardRef:
    match row:
        case {"url": str(url)}:
            return ShardRef(url, _field(row, "etag", str), _field(row, "filesize", int), _field(row, "nsamples", int))
    raise ValueError(f"a row has no url: {str(row)[:100]}")


def _field(row: dict[str, Any], name: str, kind: type[Value]) -> Value | None:
    value = row.get(name)
    if value is None:
        return None
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{name} of {row['url']} is {value!r}")
    return value
