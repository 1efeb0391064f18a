"""Index files: shards by name, with versions and numbers of samples."""

from collections.abc import Sequence

from shardcache import shardlist
from shardcache.access import WEB, checked, join, protocol_of
from shardcache.errors import NotAnIndexError
from shardcache.shards import Columns, Shards

MAX_INDEX_BYTES = 512 * 1024 * 1024
"""Size up to which a file may be an index: one of a million shards with long urls has 250 MB."""

_FORMAT = '{"shardlist": [{"url": "a.tar", "nsamples": 1000}]}'


def parse_index(url: str, data: bytes) -> Shards:
    """Parse the index file at `url`, whose format `shardlist` describes.

    Raises NotAnIndexError for any other content.
    """
    try:
        return Shards.of_columns(_resolved(url, *columns) for columns in shardlist.read(data))
    except ValueError as exn:
        raise NotAnIndexError(
            f"not an index of shards ({exn})",
            url=url,
            remedy=f"create one with `shardcache index`; format: {_FORMAT}",
        ) from exn


def _resolved(
    index: str,
    names: Sequence[str],
    etags: Sequence[str | None],
    *counts: Sequence[int | None],
) -> Columns:
    """Return an index's columns with urls for names, and versions for ETags."""
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
