"""Index files: shards by name, with versions and numbers of samples.

`expansion` calls `parse_index` for a url that names an index file. There are three kinds of lists:
the format that shardcache writes (wids), the index files of other shard formats such as MDS, and
lists of tars by other programs. `foreign_lists` parses the last kind.
"""

from collections.abc import Iterable, Sequence

from shardcache.access.deceptive import checked
from shardcache.access.protocols import WEB
from shardcache.access.urls import join, protocol_of
from shardcache.origin.http.http_semantics import plain_etag
from shardcache.origin.patterns.foreign_lists import NamedShards
from shardcache.origin.patterns.list_content import parsed_json
from shardcache.shared.exceptions import ConfigError, NotAnIndexError
from shardcache.shared.formats.format import ListedShard
from shardcache.shared.formats.format_table import FORMATS
from shardcache.shared.lists import shardlist
from shardcache.shared.lists.shard_columns import ShardColumns, Shards
from shardcache.shared.protocol import ShardRef

MAX_INDEX_BYTES = 512 * 1024 * 1024
"""Maximum size of an index file: an index of a million shards with long urls has 250 MB."""

_EXAMPLE = '{"shardlist": [{"url": "a.tar", "nsamples": 1000}]}'


def parse_index(url: str, data: bytes, split: str | None = None) -> Shards:
    """Return the shards of an index file, in wids format (`shardlist`) or a format such as MDS's.

    Args:
        url: the file's url.
        data: the file's content.
        split: the split of the dataset that the user named; None if the user named none.

    Raises NotAnIndexError for any other content, and ConfigError for any split: index files have no
    splits.
    """
    try:
        shards = Shards.of_columns(_resolved(url, *columns) for columns in shardlist.read(data))
    except ValueError as exn:  # the file is not in wids format
        of_another_format = _from_another_format(url, data)
        if of_another_format is None:
            raise NotAnIndexError(
                f"not an index of shards ({exn})",
                url=url,
                remedy=f"create one with `shardcache index`; format: {_EXAMPLE}",
            ) from exn
        shards = of_another_format
    if split is not None:
        raise ConfigError(f"the index has no splits, so none called {split!r}", url=url)
    return shards


def shards_of_list(listed: NamedShards) -> Shards:
    """Return the shards of a list that another program has written.

    Raises ConfigError for a url that nobody may request.
    """
    return Shards.of(
        ShardRef(checked(url), samples=count)
        for url, count in zip(listed.urls, listed.counts, strict=True)
    )


def _from_another_format(url: str, data: bytes) -> Shards | None:
    """Return the shards of another format's index file, such as MDS; None for any other file.

    Raises NotAnIndexError if the shards are in a variant of the format that cannot be read.
    """
    try:
        index = parsed_json(data)
    except ValueError:
        return None
    if not isinstance(index, dict):
        return None
    for format_ in FORMATS:
        try:
            listed = format_.listed_shards(index)  # None if the index is not of this format
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
    """Return the shards that an index file lists. Raises ValueError for too many shards.

    Args:
        index: url of the index file, to which the names are relative.
    """
    refs: list[ShardRef] = []
    for shard in listed:
        url = checked(join(index, shard.name))
        # These index files do not state a version.
        refs.append(ShardRef(url, size_bytes=shard.size_bytes, samples=shard.samples))
        if len(refs) > shardlist.MAX_SHARDS:
            raise ValueError(f"it lists more than {shardlist.MAX_SHARDS:,} shards")
    return Shards.of(refs)


def _resolved(
    index: str,
    names: Sequence[str],
    etags: Sequence[str | None],
    *counts: Sequence[int | None],
) -> ShardColumns:
    """Return columns of an index, with urls in place of names and versions in place of ETags.

    Args:
        index: url of the index file, to which the names are relative.
        counts: the other columns (sizes, and numbers of samples and tokens), returned unchanged.
    """
    urls = [checked(join(index, name)) for name in names]
    versions = [_version(url, etag) for url, etag in zip(urls, etags, strict=True)]
    return urls, versions, *counts


def _version(url: str, etag: str | None) -> str | None:
    """Return the version that an ETag states.

    In index files, ETags may have quotes or not. The versions of web servers have the quotes of the
    ETag, and those of all other origins do not.
    """
    if etag and '"' in etag and protocol_of(url) not in WEB:
        return plain_etag(etag)
    return etag
