"""Index files: shards by name, with versions and numbers of samples."""

from collections.abc import Iterable, Sequence

from shardcache.access.deceptive import checked
from shardcache.access.protocols import WEB
from shardcache.access.urls import join, protocol_of
from shardcache.errors import ConfigError, NotAnIndexError
from shardcache.formats.format import ListedShard
from shardcache.formats.table import FORMATS
from shardcache.origin.patterns.foreign_lists import NamedShards
from shardcache.origin.patterns.list_content import parsed_json
from shardcache.shared.lists import shardlist
from shardcache.shared.lists.shard_columns import ShardColumns, Shards
from shardcache.shared.protocol import ShardRef

MAX_INDEX_BYTES = 512 * 1024 * 1024
"""Maximum size of an index file: an index of a million shards with long urls has 250 MB."""

_FORMAT = '{"shardlist": [{"url": "a.tar", "nsamples": 1000}]}'


def parse_index(url: str, data: bytes, split: str | None = None) -> Shards:
    """Parse an index file: in the format that `shardlist` describes, or in that of MDS and others.

    Args:
        url: the file's.
        split: the split that the user named, if any.

    Raises NotAnIndexError for any other content, and ConfigError for any split, as index files have
    none.
    """
    try:
        shards = Shards.of_columns(_resolved(url, *columns) for columns in shardlist.read(data))
    except ValueError as exn:
        foreign = _from_another_format(url, data)
        if foreign is None:
            raise NotAnIndexError(
                f"not an index of shards ({exn})",
                url=url,
                remedy=f"create one with `shardcache index`; format: {_FORMAT}",
            ) from exn
        shards = foreign
    if split is not None:
        raise ConfigError(f"the index has no splits, so none called {split!r}", url=url)
    return shards


def shards_of(listed: NamedShards) -> Shards:
    """Return the shards of a list that another program has written."""
    return Shards.of(
        ShardRef(checked(url), samples=count)
        for url, count in zip(listed.urls, listed.counts, strict=True)
    )


def _from_another_format(url: str, data: bytes) -> Shards | None:
    """Return the shards of the index file of another format, such as MDS; None for other files.

    Raises NotAnIndexError if its shards are of a variant that cannot be read.
    """
    try:
        index = parsed_json(data)
    except ValueError:
        return None
    if not isinstance(index, dict):
        return None
    for format_ in FORMATS:
        try:
            listed = format_.listed(index)
            if listed is not None:
                return _listed_shards(url, listed)
        except ValueError as exn:
            raise NotAnIndexError(
                f"not an index of {format_.name} shards that can be read ({exn})",
                url=url,
                remedy="to make shards of other data, see `shardcache write`",
            ) from exn
    return None


def _listed_shards(index: str, listed: Iterable[ListedShard]) -> Shards:
    """Return shards that an index file lists relative to itself. Raises ValueError for too many."""
    refs: list[ShardRef] = []
    for shard in listed:
        url = checked(join(index, shard.name))
        refs.append(ShardRef(url, None, shard.size_bytes, shard.samples))
        if len(refs) > shardlist.MAX_SHARDS:
            raise ValueError(f"it lists more than {shardlist.MAX_SHARDS:,} shards")
    return Shards.of(refs)


def _resolved(
    index: str,
    names: Sequence[str],
    etags: Sequence[str | None],
    *counts: Sequence[int | None],
) -> ShardColumns:
    """Return an index's columns with names resolved to urls, and ETags to versions."""
    urls = [checked(join(index, name)) for name in names]
    versions = [_version(url, etag) for url, etag in zip(urls, etags, strict=True)]
    return urls, versions, *counts


def _version(url: str, etag: str | None) -> str | None:
    """Return the version that an ETag states.

    Indexes have ETags with or without quotes; an origin's versions have none, except over plain
    HTTP.
    """
    if etag and '"' in etag and protocol_of(url) not in WEB:
        return etag.strip('"')
    return etag
