"""What people write for a dataset, as a list of shards: patterns, prefixes, index files, urls."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import prod

from braceexpand import braceexpand

from shardcache import shardlist
from shardcache.errors import ConfigError, NotFoundError, OriginError
from shardcache.origin.base import RemoteObject
from shardcache.origin.globs import glob_regex
from shardcache.origin.memory import read_object
from shardcache.origin.registry import Origins
from shardcache.origin.urls import (
    INDEX_SUFFIX,
    SHARD_SUFFIXES,
    checked,
    glob_prefix,
    is_glob,
    join,
    protocol_of,
)
from shardcache.protocol import ShardRef
from shardcache.shardlist import MAX_SHARDS
from shardcache.transport.flow import Free, Received, nothing
from shardcache.units import size

# An index of a million shards with long urls has 250 MB.
MAX_INDEX_BYTES = 512 * 1024 * 1024
_READ_BYTES = 1024 * 1024

_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_MOST_DIGITS = 18
# Expanding takes more than linear time in how many braces there are, how deep they lie, and how many words they list.
_MOST_BRACES = 32
_MOST_LISTED = 10_000


async def expand(urls: str | Sequence[str], origins: Origins, received: Received = nothing) -> list[ShardRef]:
    """Return the shards that a pattern, or each of a list of patterns, stands for, in the order given.

    Braces expand first and without asking anyone; then each result is a glob (`*`, `?`, `[...]`, `**`; sorted by
    url), a prefix that ends in "/" (every shard below it; sorted by url), an index file (.json, wids format; in its
    own order) or a shard's url. Sizes and versions are set where a listing tells them.

    Raises NotFoundError for what stands for no shard at all, ConfigError for what makes no sense, and the origin's
    errors.
    """
    patterns = [urls] if isinstance(urls, str) else list(urls)
    if not patterns:
        raise NotFoundError("an empty list names no shard", remedy="give at least one url")
    shards: list[ShardRef] = []
    for pattern in patterns:
        urls, refs = await asyncio.to_thread(_expanded, pattern)
        shards += refs
        for url in urls:
            shards += await _expand_one(url, origins, received)
            _check_number(len(shards), pattern)
        _check_number(len(shards), pattern)
    return shards


def _expanded(pattern: str) -> tuple[list[str], list[ShardRef]]:
    """Return what the braces stand for: as urls that the store is asked about, or else as shards. Blocks."""
    urls = expand_braces(pattern)
    return (urls, []) if asks_store(pattern) else ([], list(map(ShardRef, urls)))


def asks_store(pattern: str) -> bool:
    """Tell whether a store is asked for what a pattern stands for; else braces alone say it. Blocks."""
    if pattern.endswith(("/", INDEX_SUFFIX)) or is_glob(pattern):
        return True
    if "{" not in pattern or pattern.endswith(SHARD_SUFFIXES):
        return False
    return any(map(asks_store, expand_braces(pattern)))


def _check_number(shards: int, pattern: str) -> None:
    if shards > MAX_SHARDS:
        raise ConfigError(
            f"it stands for more than {MAX_SHARDS:,} shards",
            url=pattern,
            remedy="write larger shards, or read the dataset in several parts",
        )


def expand_braces(pattern: str) -> list[str]:
    """Return the urls that a brace pattern stands for, as bash would, in its order.

    Raises ConfigError for braces that do not pair or do not expand, and for a range beyond `MAX_SHARDS`.
    """
    checked(pattern)
    if "{" not in pattern and "}" not in pattern:
        return [pattern]
    if pattern.count("{") > _MOST_BRACES:
        raise ConfigError(
            f"the pattern has more than {_MOST_BRACES} braces", url=pattern, remedy="split it into several"
        )
    _check_count(pattern)
    try:
        urls = list(islice(braceexpand(pattern), MAX_SHARDS + 1))
    except ValueError:
        raise ConfigError("the braces do not pair", url=pattern, remedy="write {000..099} or {a,b}") from None
    _check_number(len(urls), pattern)
    if any("{" in url or "}" in url for url in urls):
        raise ConfigError("the braces expand to nothing", url=pattern, remedy="write {000..099} or {a,b}")
    return urls


def _check_count(pattern: str) -> None:
    """Raise ConfigError for a pattern that would take minutes to expand, judged by its outermost braces."""
    ranges, lists, depth = _RANGE.findall(pattern), [1], 0
    if any(len(number) > _MOST_DIGITS for numbers in ranges for number in numbers):
        raise ConfigError("the pattern has a number beyond reason", url=pattern)
    for char in pattern:
        depth = max(0, depth + (char == "{") - (char == "}"))
        if char == "{" and depth == 1:
            lists.append(1)
        elif char == "," and depth:
            lists[-1] += 1
    counts = [abs(int(stop) - int(start)) // (int(step or 1) or 1) + 1 for start, stop, step in ranges]
    if prod(counts) > MAX_SHARDS or prod(lists) > _MOST_LISTED:
        raise ConfigError(
            "the pattern stands for more shards than anybody has", url=pattern, remedy="split it into several"
        )


async def _expand_one(url: str, origins: Origins, received: Received) -> list[ShardRef]:
    if is_glob(url):
        match = glob_regex(url).fullmatch
        found = await origins.origin(url).list_prefix(glob_prefix(url), received)
        return _some(url, [_ref(obj) for obj in found if match(obj.url)])
    if url.endswith("/"):
        found = await origins.origin(url).list_prefix(url, received)
        return _some(url, [_ref(obj) for obj in found if obj.url.endswith(SHARD_SUFFIXES)])
    if url.endswith(INDEX_SUFFIX):
        return _some(url, await asyncio.to_thread(parse_index, url, await _read(url, origins, received)))
    return [ShardRef(url)]


def _some(pattern: str, shards: list[ShardRef]) -> list[ShardRef]:
    if not shards:
        raise NotFoundError(
            "no shard matches",
            url=pattern,
            remedy="check it for typing errors; a prefix takes only " + ", ".join(SHARD_SUFFIXES),
        )
    return shards


def _ref(obj: RemoteObject) -> ShardRef:
    return ShardRef(obj.url, obj.version, obj.size_bytes)


async def _read(url: str, origins: Origins, received: Received) -> bytes:
    origin = origins.origin(url)
    obj = await origin.stat(url)
    if obj.size_bytes > MAX_INDEX_BYTES:
        raise OriginError(f"an index file of {size(obj.size_bytes)} is too large to be one", url=url)
    return await read_object(origin, obj, Free(received))


def parse_index(url: str, data: bytes) -> list[ShardRef]:
    """Read the index file that lies at `url`, as `shardlist` describes it.

    Raises OriginError for anything else.
    """
    try:
        rows = shardlist.read(data)
    except ValueError as exn:
        raise OriginError(
            f"not an index of shards ({exn})",
            url=url,
            remedy='make one with `shardcache index`; it reads {"shardlist": [{"url": "a.tar", "nsamples": 1000}]}',
        ) from exn
    return [_resolved(checked(join(url, row.url)), row) for row in rows]


def _resolved(url: str, row: ShardRef) -> ShardRef:
    # People and tools quote an ETag or do not; an origin's versions have no quotes, but for those of plain HTTP.
    version = row.version if protocol_of(url) in ("http", "https") else (row.version or "").strip('"')
    return replace(row, url=url, version=version or None)
